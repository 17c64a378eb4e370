"""Every rule where sizes do not divide, proved by execution: what padding holds never shows.

Padding of operands is either 0, as that of a step's arguments is, or poison: NaN, or numbers that
are no index of anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardweave.backends.reference.virtual_ranks import run_op_by_op, scatter_shards
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement, Sharding, is_even
from shardweave.ir.mesh.shards import resized
from shardweave.ir.ops.registry import spec_named
from shardweave.ir.sharding.padding import Padding
from shardweave.ir.sharding.rules.base import Rule
from shardweave.tests.ir.rules.samples_compute import COMPUTE
from shardweave.tests.ir.rules.samples_layout import LAYOUT
from shardweave.tests.ir.rules.samples_pointwise import POINTWISE
from shardweave.tests.ir.rules.sharded_op import (
    PARTITION,
    Cut,
    Instance,
    check_cut,
    check_equal,
    instance_of,
    program_of,
    values_for,
)
from shardweave.tests.ir.strategies import uneven_placements, uneven_sharding

SAMPLES = (*POINTWISE, *LAYOUT, *COMPUTE)
MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2), Mesh(a=3, b=2))


@cache
def instance(index: int) -> Instance:
    """A sample, computed."""
    return instance_of(SAMPLES[index])


def _poisoned(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A part with padding of which no op may take notice."""
    if tensor.is_floating_point():
        value = float("nan")
    else:
        value = True if tensor.dtype == torch.bool else 100
    found = torch.full_like(resized(tensor, shape), value)
    found[tuple(slice(size) for size in tensor.shape)] = tensor
    return found


@contextmanager
def poison() -> Iterator[None]:
    """Arguments have poison as their padding, and nothing is taken to be 0."""
    with (
        patch("shardweave.passes.partition.insert_collectives.zeros_of", lambda *_: frozenset()),
        patch("shardweave.backends.reference.virtual_ranks.resized", _poisoned),
    ):
        yield


def uneven_cuts(rule: Rule) -> Iterator[tuple[Mesh, Cut]]:
    """Each factor alone over axes that do not divide it, in plain shards and, of 3, in others."""
    for index in sorted(rule.uneven_factors - {factor for factor, _, _ in rule.groups}):
        size = rule.factors[index].size
        for count in (2, 3, 4):
            stride = -(-size // count)
            if size % count and stride < size:
                cuts = rule.one_cut(index, Placement("a", count, stride))
                yield Mesh(a=count), Cut(tuple(cuts))


def random_cut(rule: Rule, mesh: Mesh, random: Random) -> Cut:
    """The axes at random places of random factors."""
    chosen: list[list[str]] = [[] for _ in rule.factors]
    for axis in mesh.names:
        random.choice(chosen).append(axis)
    pairs = zip(rule.factors, chosen, strict=True)
    cuts = [
        uneven_placements(f.size, own, mesh, random, contiguous=f.contiguous) for f, own in pairs
    ]
    return Cut(tuple(rule.completed(cuts)))


def check_random(index: int, random: Random) -> bool:
    """One random cut of a sample, with either padding; whether there was one to check."""
    one, mesh = instance(index), random.choice(MESHES)
    if not one.rule.factors:
        return False
    cut = random_cut(one.rule, mesh, random)
    sizes = [factor.size for factor in one.rule.factors]
    if all(map(is_even, cut.factors, sizes)) or not cut.is_possible(one.rule):
        return False
    if random.random() < 0.5:
        check_cut(one, mesh, cut)
    else:
        with poison():
            check_cut(one, mesh, cut)
    return True


def check_shardings(index: int, random: Random) -> None:
    """Operands from and results to random shardings, which the op may need otherwise."""
    one, mesh = instance(index), random.choice(MESHES)
    operands = [uneven_sharding(tensor.shape, mesh, random) for tensor in one.operands]
    results = [uneven_sharding(tensor.shape, mesh, random) for tensor in one.results]
    check_equal(one, mesh, operands, results)


@pytest.mark.parametrize("poisoned", [False, True])
def test_padding_does_not_show_in_any_result(poisoned: bool) -> None:
    random, done = Random(0), 0
    for index in random.sample(range(len(SAMPLES)), 40):
        one = instance(index)
        for mesh, cut in list(uneven_cuts(one.rule))[:2]:
            if cut.is_possible(one.rule):
                if poisoned:
                    with poison():
                        check_cut(one, mesh, cut)
                else:
                    check_cut(one, mesh, cut)
                done += 1
    assert done > 20


@pytest.mark.slow
def test_every_factor_that_can_be_cut_unevenly_is() -> None:
    done: set[str] = set()
    for index in range(len(SAMPLES)):
        one = instance(index)
        for mesh, cut in uneven_cuts(one.rule):
            if cut.is_possible(one.rule):
                check_cut(one, mesh, cut)
                with poison():
                    check_cut(one, mesh, cut)
                done.add(one.op.name)
    assert len(done) > 100


@pytest.mark.slow
def test_two_thousand_random_cases() -> None:
    random, done = Random(14), 0
    while done < 1600:
        done += check_random(random.randrange(len(SAMPLES)), random)
    for _ in range(400):
        check_shardings(random.randrange(len(SAMPLES)), random)


def test_padding_that_is_said_to_be_zero_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Padding] = []

    def observed() -> Padding:
        seen.append(Padding())
        return seen[-1]

    monkeypatch.setattr("shardweave.passes.partition.insert_collectives.Padding", observed)
    random, said = Random(5), set[str]()
    for index, sample in enumerate(SAMPLES):
        if spec_named(sample.op).zero is None:
            continue
        one = instance(index)
        for mesh, cut in list(uneven_cuts(one.rule))[:1]:
            if not cut.is_possible(one.rule) or (sample.op in said and random.random() < 0.7):
                continue
            operands = cut.operand_shardings(one.rule)
            results = cut.result_shardings(one.rule, mesh)
            local = PARTITION.run(program_of(one, mesh, operands, results))
            values = values_for(one, operands, mesh)
            environment = {
                slot.value: scatter_shards(values["input", slot.name], sharding, mesh)
                for slot, sharding in zip(local.arguments, operands, strict=True)
            }
            list(run_op_by_op(local, environment, mesh))
            for slot, sharding, whole in zip(local.results, results, one.results, strict=False):
                for dim in seen[-1].zero.get(slot.value, ()):
                    said.add(sample.op)
                    for rank, part in enumerate(environment[slot.value]):
                        size = sharding.held_shape(whole.shape, mesh.coordinates(rank))[dim]
                        assert not part.narrow(dim, size, part.shape[dim] - size).any(), one.op
    assert len(said) > 40


def test_no_reshard_loses_or_adds_an_element() -> None:
    random = Random(3)
    picked = [i for i, s in enumerate(SAMPLES) if s.op in ("aten.add.Tensor", "aten.neg")]
    for _ in range(25):
        check_shardings(random.choice(picked), random)


def test_uneven_parts_have_the_size_of_the_largest() -> None:
    sharding = Sharding(((Placement("a", 4, 2),), ()))
    assert sharding.local_shape((6, 5)) == (2, 5)
    held = [sharding.held_shape((6, 5), {"a": index}) for index in range(4)]
    assert held == [(2, 5), (2, 5), (2, 5), (0, 5)]
