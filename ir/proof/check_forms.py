"""Whether ops of a local program are the local form of an op, as its rule writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation, OpResult, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.proof.check_rules import pending_over, require
from shardweave.ir.proof.held import (
    FREE,
    Coordinates,
    Cuts,
    ProofAxes,
    RankNumber,
    Relation,
    Shape,
    Value,
)
from shardweave.ir.proof.local_forms import OpForm, written
from shardweave.ir.proof.ops import draws, is_cast, kind_of
from shardweave.ir.proof.positions import index_of, rank_position
from shardweave.ir.proof.sub_batches import united


@dataclass
class FormMatch:
    """Values of a program beside those of a local form.

    claims_of: what is claimed of a value. source_of: the value that one is by another name. parts:
    what the form's arguments are. numbers: the values of the form that are positions of a rank.
    """

    claims_of: Callable[[SSAValue], Sequence[Value]]
    source_of: Callable[[SSAValue], SSAValue]
    parts: Mapping[SSAValue, Relation]
    numbers: Mapping[SSAValue, RankNumber]
    _known: dict[tuple[SSAValue, SSAValue], bool] = field(
        default_factory=dict[tuple[SSAValue, SSAValue], bool]
    )

    def is_same(self, wanted: SSAValue, value: SSAValue) -> bool:
        """Whether a value is computed as one of the form is, on the same parts."""
        key = wanted, value
        if key not in self._known:
            self._known[key] = self._is_same(wanted, value)
        return self._known[key]

    def _is_same(self, wanted: SSAValue, value: SSAValue) -> bool:
        claims = self.claims_of(value)
        if wanted in self.parts:
            return self.parts[wanted] in claims
        if wanted in self.numbers and self.numbers[wanted] in claims:
            return True
        goal = wanted.owner
        if isinstance(goal, Operation) and is_cast(goal):
            return self.is_same(goal.operands[0], value)
        return self.is_made_alike(wanted, self.source_of(value))

    def is_made_alike(self, wanted: SSAValue, value: SSAValue) -> bool:
        """Whether the op of a value is that of one of the form."""
        if not (isinstance(wanted, OpResult) and isinstance(value, OpResult)):
            return False
        goal, owner = wanted.op, value.op
        if not _is_alike(goal, owner):
            return False
        if isinstance(goal, dist.DistOp) and goal.operands:
            return self.is_same(goal.operands[wanted.index], owner.operands[value.index])
        pairs = zip(goal.operands, owner.operands, strict=True)
        return wanted.index == value.index and all([self.is_same(*pair) for pair in pairs])


def _is_alike(goal: Operation, op: Operation) -> bool:
    """Whether two ops compute the same of the same operands."""
    if op.name.replace("dist.start_", "dist.") != goal.name:
        return False
    if arguments_of(op) != arguments_of(goal):
        return False
    if isinstance(op, AtenOp) and draws(op):
        return False
    if isinstance(op, dist.DistOp):  # of each operand by itself
        return bool(op.operands) == bool(goal.operands)
    types = [[(shape_of(r), kind_of(r)) for r in one.results] for one in (op, goal)]
    return types[0] == types[1] and len(op.operands) == len(goal.operands)


def check_form(
    op: Operation,
    form: OpForm,
    parts: Sequence[Relation],
    cuts: Cuts,
    places: Sequence[int | None],
    claims_of: Callable[[SSAValue], Sequence[Value]],
    source_of: Callable[[SSAValue], SSAValue],
    axes: ProofAxes,
    at: Coordinates,
) -> None:
    """Check that an op's results are, by place, those of the local form of an op of the global
    program on such parts. Raises Unfounded."""
    carried = pending_over(form.rule, parts)
    shapes: list[Shape] = []
    for index, result in enumerate(form.op.results):
        sharding = form.rule.result(index, cuts, carried, axes.names)
        require(sharding is not None, "a result cannot be computed on shards")
        assert sharding is not None
        shapes.append(sharding.local_shape(shape_of(result)))
    arguments, ops, results = written(form, parts, cuts, shapes, axes.mesh)
    coordinates = dict((united(parts) if parts else at) or ())
    numbers: dict[SSAValue, RankNumber] = {}
    for one in ops:
        if isinstance(one, dist.ShardIndexOp):
            require(not any(axis.startswith(FREE) for axis in one.axes), "no axis cuts it")
            numbers[one.results[0]] = rank_position(one.axes, axes, coordinates)
        elif isinstance(one, AtenOp):
            index = index_of(one, [numbers.get(value) for value in one.operands])
            if index is not None:
                numbers[one.results[0]] = index
    match = FormMatch(claims_of, source_of, dict(zip(arguments, parts, strict=True)), numbers)
    for result, place in zip(op.results, places, strict=True):
        if place is not None:
            alike = match.is_made_alike(results[place], result)
            require(alike, "is not the local form of the op")
