"""Placements as digits of an index: what fits, what is plain, and which part a device holds."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import (
    DimSharding,
    Placement,
    Sharding,
    block_of,
    contiguous,
    fits,
    held_size,
    is_contiguous,
    ordered,
    padded_size,
    part_size,
)
from shardweave.tests.ir.strategies import (
    all_coordinates,
    indices_of,
    meshes,
    random_sharding,
    randoms,
    shapes,
    uneven_placements,
)

MESH = Mesh(a=2, b=3, one=1)
A, B = Placement("a", 2, 6), Placement("b", 3, 2)


def test_span_is_where_a_placement_repeats() -> None:
    assert A.span == 12
    assert B.span == 6


def test_placements_are_ordered_major_to_minor() -> None:
    assert ordered([B, A]) == (A, B)


@pytest.mark.parametrize(
    ("placements", "size", "expected"),
    [
        ((), 5, True),
        ((A, B), 12, True),
        ((A, B), 24, True),
        ((A, B), 18, True),
        ((A, B), 6, False),
        ((Placement("a", 2, 1),), 4, True),
        ((Placement("a", 2, 2), Placement("b", 2, 2)), 8, False),
        ((Placement("a", 2, 3), Placement("b", 2, 2)), 12, False),
        ((Placement("a", 2, 4), Placement("b", 2, 1)), 8, True),
    ],
)
def test_placements_fit_a_dim_as_digits_of_its_index(
    placements: DimSharding, size: int, expected: bool
) -> None:
    assert fits(placements, size) is expected


def test_plain_shards_nest_in_the_order_of_the_axes() -> None:
    assert contiguous(["a", "b"], 24, MESH) == (Placement("a", 2, 12), Placement("b", 3, 4))
    assert contiguous(["b", "a"], 24, MESH) == (Placement("b", 3, 8), Placement("a", 2, 4))


def test_an_axis_of_one_device_places_nothing() -> None:
    assert contiguous(["one"], 5, MESH) == ()


def test_shards_of_a_dim_that_does_not_divide_are_as_large_as_the_largest() -> None:
    assert contiguous(["a", "b"], 8, MESH) == (Placement("a", 2, 6), Placement("b", 3, 2))
    assert [p.length for p in contiguous(["a", "b"], 8, MESH)] == [8, 8]
    assert [p.length for p in contiguous(["a", "b"], 12, MESH)] == [0, 0]


@given(st.integers(2, 40), meshes, randoms)
def test_parts_are_those_of_the_indices_that_a_device_holds(
    size: int, mesh: Mesh, random: Random
) -> None:
    dim = uneven_placements(size, mesh.names, mesh, random)
    assert padded_size(dim, size) % part_size(dim, size) == 0
    for at in all_coordinates(mesh):
        held = indices_of(dim, size, at)
        assert held_size(dim, size, at) == len(held) <= part_size(dim, size)
        if is_contiguous(dim, size) and held:
            assert held == list(range(held[0], held[-1] + 1))


def test_plain_shards_are_those_of_chunk() -> None:
    for size in range(2, 30):
        for count in (2, 3, 4):
            if -(-size // count) < size:
                dim = contiguous(["x"], size, Mesh(x=count))
                held = [held_size(dim, size, {"x": index}) for index in range(count)]
                chunks = [len(chunk) for chunk in torch.arange(size).chunk(count)]
                assert held == chunks + [0] * (count - len(chunks))


def test_axes_for_which_a_dim_is_too_small_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"size 1 .* axes \['a'\] of sizes \[2\]: with 1 indices for each shard"
    ):
        contiguous(["a"], 1, MESH)
    with pytest.raises(ValueError, match="no axis 'c'"):
        contiguous(["c"], 8, MESH)


@pytest.mark.parametrize(
    ("placements", "size", "expected"),
    [
        ((), 7, True),
        ((A, B), 12, True),
        ((A, B), 24, False),
        ((Placement("a", 2, 6), Placement("b", 3, 1)), 12, False),
        ((Placement("a", 2, 1),), 2, True),
    ],
)
def test_plain_shards_are_told_from_strided_ones(
    placements: DimSharding, size: int, expected: bool
) -> None:
    assert is_contiguous(placements, size) is expected


def test_local_and_global_shapes_are_inverse() -> None:
    sharding = Sharding(((A, B), ()))
    assert sharding.local_shape((24, 5)) == (4, 5)
    assert sharding.global_shape((4, 5)) == (24, 5)


def test_whole_drops_what_is_left_to_reduce() -> None:
    pending = Sharding(((A,), ()), ("b",), "max")
    assert pending.whole() == Sharding(((A,), ()))
    assert pending.axes == {"a", "b"}
    assert pending.placed_axes == {"a"}
    assert not pending.is_replicated
    assert Sharding.replicated(2) == Sharding(((), ()))
    assert Sharding.replicated(2).is_replicated


@pytest.mark.parametrize(
    ("sharding", "shape", "problem"),
    [
        (Sharding(((A,), ())), (12, 5), None),
        (Sharding(((A,),)), (12, 5), "it has 1 dims, the value has 2"),
        (Sharding(((Placement("c", 2, 6),),)), (12,), "has no axis 'c'; name another, or add it"),
        (Sharding(((),), ("c",)), (12,), "has no axis 'c'"),
        (Sharding(((A,), (A,))), (12, 12), "axis 'a' is used twice"),
        (Sharding(((A,),), ("a",)), (12,), "axis 'a' is used twice"),
        (Sharding(((Placement("a", 3, 4),),)), (12,), "dim 0 names a size that is not the mesh's"),
        (Sharding(((), (A,))), (5, 6), "strides [6] do not cut dim 1 of size 6"),
    ],
)
def test_a_sharding_says_why_it_does_not_suit_a_value(
    sharding: Sharding, shape: tuple[int, ...], problem: str | None
) -> None:
    found = sharding.problem(shape, MESH)
    assert found == problem if problem is None else problem in (found or "")


def test_block_is_the_run_that_a_placement_keeps_together() -> None:
    # 24 indices: a is the outermost digit, b deals single indices round-robin.
    outer, inner = Placement("a", 2, 12), Placement("b", 3, 1)
    assert block_of((outer, inner), outer) == 4
    assert block_of((outer, inner), inner) == 1
    assert block_of((outer,), outer) == 12


@given(shapes, meshes, randoms)
def test_each_index_is_held_by_the_same_number_of_devices(
    shape: tuple[int, ...], mesh: Mesh, random: Random
) -> None:
    sharding = random_sharding(shape, mesh, random)
    assert sharding.problem(shape, mesh) is None
    for dim, (placements, size) in enumerate(zip(sharding.dims, shape, strict=True)):
        held = [indices_of(placements, size, at) for at in all_coordinates(mesh)]
        assert {len(indices) for indices in held} == {sharding.local_shape(shape)[dim]}
        counts = {sum(index in indices for indices in held) for index in range(size)}
        assert len(counts) == 1


@given(shapes, meshes, randoms, randoms)
def test_shardings_are_equal_exactly_if_all_devices_hold_the_same(
    shape: tuple[int, ...], mesh: Mesh, random: Random, other: Random
) -> None:
    one, two = (random_sharding(shape, mesh, r) for r in (random, other))
    held = [
        [
            [indices_of(dim, n, at) for dim, n in zip(sharding.dims, shape, strict=True)]
            for at in all_coordinates(mesh)
        ]
        for sharding in (one, two)
    ]
    assert (one == two) is (held[0] == held[1])
