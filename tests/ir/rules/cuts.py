"""Choices of mesh axes for the factors of a rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement
from shardweave.ir.sharding.rules import Rule
from shardweave.tests.ir.rules.sharded_op import Cut
from shardweave.tests.ir.strategies import random_placements

PAIRS = (Mesh(a=2, b=2), Mesh(a=2, b=3))


def single_cuts(rule: Rule) -> Iterator[tuple[Mesh, Cut]]:
    """Each factor alone, over an axis of 2 and one of 3 devices: plain shards, and others."""
    counted = {factor for factor, _, _ in rule.groups}
    for index, factor in enumerate(rule.factors):
        for size in (2, 3) if index not in counted else ():
            if factor.size % size == 0:
                strides = {factor.size // size} if factor.contiguous else {factor.size // size, 1}
                for stride in sorted(strides, reverse=True):
                    cuts = rule.one_cut(index, Placement("a", size, stride))
                    yield Mesh(a=size), Cut(tuple(cuts))


def random_cut(rule: Rule, mesh: Mesh, random: Random, axes: Sequence[str]) -> Cut:
    """The axes at random places of random factors; on one factor if they happen to fall so."""
    chosen: list[list[str]] = [[] for _ in rule.factors]
    for axis in axes:
        free = [
            index
            for index, factor in enumerate(rule.factors)
            if factor.size % (mesh.sizes(chosen[index]) * mesh.size(axis)) == 0
        ]
        if free:
            chosen[random.choice(free)].append(axis)
    factors = zip(rule.factors, chosen, strict=True)
    cuts = [random_placements(f.size, own, mesh, random) for f, own in factors]
    return Cut(tuple(rule.completed(cuts)))
