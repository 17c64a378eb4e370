"""Reading a program's linear maps as AxoNN's layers, by structure.

Maps that x cuts along their outputs begin a pair of column- and row-parallel maps
(`planners.structure`), those that it cuts along their inputs end one and are the transposed
layers. So the stream that pairs read from and add to is cut by y, and what lies inside a pair by
x, which is AxoNN's alternation wherever layers follow each other. A map in no pair is a layer of
its own: y cuts its inputs, and x leaves it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from xdsl.ir import SSAValue

from shardweave.ir.annotations import layer_of, phase_of
from shardweave.ir.aten import AtenOp
from shardweave.ir.blocks import blocks_of
from shardweave.ir.facts import weight_of
from shardweave.ir.placement import Placement
from shardweave.ir.program import Program
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.ir.types import shape_of
from shardweave.planners.axonn.model import LinearLayer
from shardweave.planners.structure import Cut, back_through, parameter_of


@dataclass(frozen=True)
class Map:
    """A linear map of a program with a parameter of its own.

    contracted, produced: the factors of k and n in its rule. views: between parameter and op.
    """

    op: AtenOp
    parameter: SSAValue
    views: tuple[AtenOp, ...]
    contracted: int
    produced: int

    @property
    def rule(self) -> Rule:
        return rule_of(self.op)

    @property
    def weight(self) -> int:
        """Index of the weight among the operands."""
        weight = weight_of(self.op)
        assert weight is not None
        return weight

    def is_contracted_in(self, cut: Cut) -> bool:
        """Whether a cut of the parameter falls on k."""
        for dim, placements in enumerate(cut):
            for placement in placements:
                return self._factor(dim, placement) == self.contracted
        return False

    def cut(self, factor: int, axis: str, size: int) -> Cut | None:
        """The parameter's cut along k or n in plain shards; None if it does not divide."""
        extent = self.rule.factors[factor].size
        if extent % size or size == 1:
            return None
        cuts = self.rule.one_cut(factor, Placement(axis, size, extent // size))
        of_weight = self.rule.dims_of(self.rule.operands[self.weight], cuts)
        return back_through(list(self.views), of_weight)

    def _factor(self, dim: int, placement: Placement) -> int | None:
        """The factor of the op that a placement on a dim of the parameter cuts."""
        cut: Cut = tuple(
            (placement,) if index == dim else () for index in range(len(shape_of(self.parameter)))
        )
        for view in reversed(self.views):
            rule = rule_of(view)
            carried = rule.carry(rule.operands[0], rule.results[0], cut)
            if carried is None or not any(carried):
                return None
            cut = carried
        for names, placements in zip(self.rule.operands[self.weight], cut, strict=True):
            for one in placements:
                seat = self.rule.seat(names, one)
                return seat[0] if seat else None
        return None


def linear_maps(program: Program) -> Iterator[Map]:
    """The linear maps and convolutions of the forward pass, in order."""
    parameters = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in program.ops:
        weight = weight_of(op)
        if not isinstance(op, AtenOp) or weight is None or phase_of(op) != "forward":
            continue
        found = parameter_of(op.operands[weight], parameters)
        factors = _sides(rule_of(op), weight)
        if found is not None and factors is not None:
            yield Map(op, found[0], tuple(found[1]), *factors)


def _sides(rule: Rule, weight: int) -> tuple[int, int] | None:
    """The factors (k, n) of a linear map's rule."""
    produced = {factor for names in rule.results[0] for factor in names}
    activation = {factor for names in rule.operands[weight - 1] for factor in names}
    of_weight = [factor for names in rule.operands[weight] for factor in names]
    contracted = [f for f in of_weight if f in activation and f not in produced]
    outputs = [f for f in of_weight if f in produced and f not in activation]
    return (contracted[0], outputs[0]) if contracted and outputs else None


def layers_of(program: Program, pairs: Mapping[SSAValue, Cut]) -> list[LinearLayer]:
    """The layers of a program, given its pairs' cuts, in order."""
    found: list[LinearLayer] = []
    blocks = blocks_of(program)
    for one in linear_maps(program):
        weight = one.op.operands[one.weight]
        k, n = (one.rule.factors[f].size for f in (one.contracted, one.produced))
        inputs = shape_of(one.op.operands[one.weight - 1])
        found.append(
            LinearLayer(
                rows_in=prod(inputs) // k,
                rows_out=prod(shape_of(one.op.results[0])) // n,
                k=k,
                n=n,
                is_transposed=one.is_contracted_in(pairs.get(one.parameter, ())),
                kernel=prod(shape_of(weight)) // (k * n),
                block=blocks.of_op(one.op) or layer_of(one.op),
            )
        )
    return found
