"""The rules of the most used families on random shapes, cut at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.ir.mesh.mesh import Mesh
from shardweave.tests.ir.rules.cuts import random_cut
from shardweave.tests.ir.rules.sharded_op import (
    Cut,
    Sample,
    check_cut,
    check_equal,
    instance_of,
    sample,
)
from shardweave.tests.ir.rules.tensors import booleans, normal
from shardweave.tests.ir.strategies import SIZES, meshes, random_sharding, randoms, shapes

examples = settings(max_examples=60)


def check(given_sample: Sample, mesh: Mesh, random: Random) -> None:
    """Cut the op at random, let a sum pass if it can, and then shard its operands at random."""
    instance = instance_of(given_sample)
    rule = instance.rule
    carried = tuple(axis for axis in mesh.names if rule.linear and random.random() < 0.2)
    free = [axis for axis in mesh.names if axis not in carried]
    cut = Cut(random_cut(rule, mesh, random, free).factors, carried)
    if cut.is_possible(rule):
        check_cut(instance, mesh, cut)
    operands = [random_sharding(t.shape, mesh, random) for t in instance.operands]
    results = [random_sharding(t.shape, mesh, random) for t in instance.results]
    check_equal(instance, mesh, operands, results)


def grouped(sizes: Sequence[int], random: Random) -> list[int]:
    """Adjacent sizes multiplied together at random, and a 1 here and there."""
    found: list[int] = []
    for size in sizes:
        if found and random.random() < 0.5:
            found[-1] *= size
        else:
            found.append(size)
    if random.random() < 0.3:
        found.insert(random.randrange(len(found) + 1), 1)
    return found


@given(st.lists(st.sampled_from([2, 2, 3, 4, 6]), max_size=5), meshes, randoms)
@settings(max_examples=120)
def test_view(sizes: list[int], mesh: Mesh, random: Random) -> None:
    after = grouped(sizes, random)
    if random.random() < 0.2:
        # Sizes that do not nest in those before.
        random.shuffle(after)
    check(sample("view", normal(*grouped(sizes, random)), after), mesh, random)


@given(shapes, st.sampled_from(SIZES), st.data(), meshes, randoms)
@examples
def test_slice(
    rest: tuple[int, ...], size: int, data: st.DataObject, mesh: Mesh, random: Random
) -> None:
    size *= 2
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    step = data.draw(st.sampled_from([1, 1, 2, 3, 4]))
    dim = data.draw(st.integers(0, min(len(rest), 2)))
    shape = [*rest[:2][:dim], size, *rest[:2][dim:]]
    check(sample("slice.Tensor", normal(*shape), dim, start, end, step), mesh, random)


@given(shapes, st.sampled_from([4, 6, 12]), st.data(), meshes, randoms)
@examples
def test_slice_of_equal_blocks(
    rest: tuple[int, ...], block: int, data: st.DataObject, mesh: Mesh, random: Random
) -> None:
    blocks = data.draw(st.integers(1, 4))
    first = data.draw(st.integers(0, blocks - 1))
    last = data.draw(st.integers(first + 1, blocks))
    shape = [*rest[:1], blocks * block, *rest[1:2]]
    arguments = len(rest[:1]), first * block, last * block
    check(sample("slice.Tensor", normal(*shape), *arguments), mesh, random)
    part = [*rest[:1], (last - first) * block, *rest[1:2]]
    check(sample("slice_backward", normal(*part), shape, *arguments, 1), mesh, random)


@given(shapes, st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), meshes, randoms)
@examples
def test_cat(rest: tuple[int, ...], lengths: list[int], mesh: Mesh, random: Random) -> None:
    rest = rest[:2]
    dim = random.randrange(len(rest) + 1)
    parts = [normal(*rest[:dim], length, *rest[dim:]) for length in lengths]
    check(sample("cat", parts, dim), mesh, random)


@given(st.tuples(*[st.sampled_from(SIZES)] * 3), meshes, randoms)
@examples
def test_mm(sizes: tuple[int, int, int], mesh: Mesh, random: Random) -> None:
    i, k, j = sizes
    check(sample("mm", normal(i, k), normal(k, j)), mesh, random)


@given(shapes, st.data(), st.booleans(), meshes, randoms)
@examples
def test_sum(
    shape: tuple[int, ...], data: st.DataObject, keepdim: bool, mesh: Mesh, random: Random
) -> None:
    rank = len(shape)
    dims = data.draw(st.lists(st.integers(-rank, rank - 1), unique_by=lambda d: d % rank))
    name = data.draw(st.sampled_from(["sum.dim_IntList", "amax"]))
    check(sample(name, normal(*shape), dims, keepdim), mesh, random)


def narrowed(shape: Sequence[int], random: Random) -> list[int]:
    """A shape that broadcasts to the given one."""
    kept = shape[random.randrange(len(shape) + 1) :]
    return [random.choice([1, size]) for size in kept]


@given(shapes, meshes, randoms)
@examples
def test_expand(shape: tuple[int, ...], mesh: Mesh, random: Random) -> None:
    check(sample("expand", normal(*narrowed(shape, random)), shape), mesh, random)


@given(shapes, meshes, randoms)
@examples
def test_broadcasting(shape: tuple[int, ...], mesh: Mesh, random: Random) -> None:
    left, right = narrowed(shape, random), narrowed(shape, random)
    check(sample("add.Tensor", normal(*left), normal(*right)), mesh, random)
    condition = booleans(*narrowed(shape, random))
    check(sample("where.self", condition, normal(*left), normal(*right)), mesh, random)


@given(shapes, meshes, randoms)
@examples
def test_permute(shape: tuple[int, ...], mesh: Mesh, random: Random) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    check(sample("permute", normal(*shape), order), mesh, random)


@given(shapes, st.data(), meshes, randoms)
@examples
def test_repeat(shape: tuple[int, ...], data: st.DataObject, mesh: Mesh, random: Random) -> None:
    shape = shape[:2]
    copies = data.draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=3))
    check(sample("repeat", normal(*shape), copies), mesh, random)
