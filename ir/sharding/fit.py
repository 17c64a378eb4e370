"""Checking that one sharding of an op's factors explains all its operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from xdsl.ir import Operation

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Sharding, ordered
from shardweave.ir.sharding.rules import Rule


@dataclass(frozen=True)
class Misfit:
    """A problem with an op's shardings. operand: index of the operand at fault, if there is one."""

    problem: str
    operand: int | None = None

    def text(self, op: Operation) -> str:
        """The problem as messages say it, with the operand's name."""
        if self.operand is None:
            return self.problem
        name = op.operands[self.operand].name_hint or self.operand
        return f"operand {self.operand} (%{name}) {self.problem}"


@lru_cache(maxsize=16384)
def fitting_factors(
    rule: Rule, operands: tuple[Sharding, ...], results: tuple[Sharding, ...], mesh: Mesh
) -> tuple[DimSharding, ...] | Misfit:
    """Infer the placements of an op's factors from its operands and results; returns a Misfit if
    they conflict.

    Each operand and result must be sharded as its factors are. A result must be unreduced over the
    axes of the sharded factors that it lacks, and over the axes over which all operands in
    `rule.linear` are unreduced sums.
    """
    factors: list[DimSharding] = [()] * len(rule.factors)
    values = zip((*rule.operands, *rule.results), (*operands, *results), strict=True)
    for index, (dims, sharding) in enumerate(values):
        cuts = rule.factors_of(dims, sharding.dims)
        if cuts is None:
            after = index - len(operands)
            if after < 0:
                return Misfit("is cut where the op needs it whole", index)
            return Misfit(f"result {after} is cut where the op cannot cut it")
        factors = [ordered({*x, *y}) if y else x for x, y in zip(factors, cuts, strict=True)]
    axes = [placement.axis for placement in rule.placements(factors)]
    if len(set(axes)) != len(axes):
        twice = sorted({axis for axis in axes if axes.count(axis) > 1})
        return Misfit(f"its operands cut different dims over {twice}")
    return _misfit(rule, operands, results, factors, mesh) or tuple(factors)


def _misfit(
    rule: Rule,
    operands: Sequence[Sharding],
    results: Sequence[Sharding],
    factors: Sequence[DimSharding],
    mesh: Mesh,
) -> Misfit | None:
    if not all(map(rule.can_cut, range(len(factors)), factors)):
        return Misfit("it cannot be computed on shards of these operands")
    linear = [operands[index].unreduced for index in sorted(rule.linear)]
    carried = linear[0] if linear else ()
    for index, (dims, sharding) in enumerate(zip(rule.operands, operands, strict=True)):
        pending = carried if index in rule.linear else ()
        if sharding.unreduced != pending or (pending and sharding.reduction != "sum"):
            return Misfit(f"is an unreduced {sharding.reduction} that the op cannot carry", index)
        if sharding.dims != rule.dims_of(dims, factors):
            return Misfit("is not cut as the other operands and the results are", index)
    for index, sharding in enumerate(results):
        wanted = rule.result(index, factors, carried, mesh.names)
        if wanted is None:
            return Misfit(f"result {index} cannot be computed on shards of these operands")
        if sharding != wanted:
            shape = [prod(rule.factors[f].size for f in names) for names in rule.results[index]]
            made, said = (ShardingAttr.of(s, tuple(shape)) for s in (wanted, sharding))
            return Misfit(f"result {index} comes out as {made}, but its sharding is {said}")
    return None
