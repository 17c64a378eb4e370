"""propagate-shardings: complete a few annotations to the whole program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from xdsl.context import Context
from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, SSAValue
from xdsl.passes import ModulePass

from shardweave.ir.aten import AtenOp
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.placement import DimSharding, Placement, Sharding, fits, ordered
from shardweave.ir.program import Program, Slot
from shardweave.ir.sharding.assignment import Choice, dims_of, price_of, seat_of
from shardweave.ir.sharding.flow import Flow, annotated, aten_ops, sharding_property
from shardweave.ir.sharding.pending_sums import add_pending_first
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.ir.sharding.split_addmm import split_addmms
from shardweave.ir.types import shape_of
from shardweave.passes.idle_axes import note_idle_axes

_LOOKAHEAD = 6


@dataclass(frozen=True)
class PropagateShardingsPass(ModulePass):
    """Give every value of the global program a sharding, from the annotated ones.

    Forward in program order: each op is cut by the axes that cut its operands; conflicts go by
    priority (annotations of the plan and the user, then the larger tensor). A pending sum
    travels through linear ops while it has a single use, and is reduced, or scattered where
    shards are wanted, at the first op that needs it; pending sums are added to each other
    before anything else. Then backward, to a fixed point: a value
    that all its uses want in shards, and that can be made in shards for free, is made so
    (masks, constants, biases); parameters without annotation adopt what their uses want.

    Requires: a global program with a mesh. Ensures: every op has `sharding`, every argument
    and result has `dist.sharding`; numerics unchanged. Linear in the ops.
    """

    name = "propagate-shardings"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        if program.mesh is None:
            raise ValueError("the program has no mesh; give one (mesh=..., or --mesh data=2).")
        note_idle_axes(program)
        split_addmms(program)
        propagation = _Propagation(program)
        if propagation.regrouped():
            propagation = _Propagation(program)
        propagation.run()


class _Propagation:
    def __init__(self, program: Program) -> None:
        assert program.mesh is not None
        self.program = program
        self.flow = Flow(program, program.mesh)
        self.ops = aten_ops(program)
        self.choices: dict[AtenOp, Choice] = {}
        slots = program.arguments
        self.results = program.results
        self.arguments = {(slot.kind, slot.name): slot.value for slot in slots}
        self.free = dict.fromkeys(
            s.value for s in slots if s.sharding_attr is None and s.kind != "tangent"
        )

    def regrouped(self) -> bool:
        """Whether sums had to be regrouped, after which propagation starts anew."""
        for op in self.ops:
            self._forward(op)
        return add_pending_first(self.ops, self.flow)

    def run(self) -> None:
        if not self.choices:
            for op in self.ops:
                self._forward(op)
        for _ in range(4):
            if not self._backward():
                break
        self._annotate()

    # Forward

    def _forward(self, op: AtenOp) -> None:
        goals = annotated(op, self.program)
        hints = list(self._scatter_hints(op))
        choice = self.flow.choose(op, goals, hints)
        self.choices[op] = choice
        for operand, wanted in zip(op.operands, choice.operands, strict=True):
            self.flow.use(operand, wanted)
        shardings = [
            goal if goal is not None else self._settled(result, produced)
            for result, produced, goal in zip(op.results, choice.results, goals, strict=True)
        ]
        self.flow.define(op, shardings)

    def _settled(self, result: SSAValue, produced: Sharding) -> Sharding:
        """What to keep of a result: a pending sum with several uses is reduced at once."""
        if not produced.unreduced or result.has_one_use() or result.first_use is None:
            return produced
        settled = produced.whole()
        if produced.reduction == "sum":
            for axis in produced.unreduced:
                seat = self._wanted_seat(result, axis, _LOOKAHEAD)
                if seat is not None:
                    settled = _placed(settled, *seat, shape_of(result)) or settled
        return settled

    def _scatter_hints(self, op: AtenOp) -> Iterator[tuple[str, int, int]]:
        """Seats for axes of a sum, read off what the consumers of its result hold.

        Either the sum comes with an operand, or the op itself would make one over shards: that
        of an embedding's gradient over tokens, where the embedding is cut along its rows.
        """
        rule = rule_of(op)
        operands = [self.flow.sharding(v) for v in op.operands]
        pending = {a for sharding in operands for a in sharding.unreduced}
        placed = {a for sharding in operands for a in sharding.placed_axes}
        travels = {
            a
            for a in pending
            if all(a in operands[i].unreduced for i in rule.linear) and rule.linear
        }
        for axis in sorted((pending - placed - travels) | _summed_axes(rule, operands)):
            for result, dims in zip(op.results, rule.results, strict=True):
                seat = self._wanted_seat(result, axis, _LOOKAHEAD)
                if seat is not None:
                    found = seat_of(rule, dims[seat[0]], seat[1])
                    if found is not None:
                        yield (axis, *found)

    def _wanted_seat(self, value: SSAValue, axis: str, depth: int) -> tuple[int, Placement] | None:
        """Where the uses of a value, further down, hold `axis`: (dim, placement), if they do."""
        if depth == 0:
            return None
        for use in value.uses:
            user = use.operation
            if isinstance(user, func.ReturnOp):
                seat = self._result_seat(use.index, axis)
            elif isinstance(user, AtenOp):
                seat = self._seat_at(user, use.index, axis, depth)
            else:
                seat = None
            if seat is not None:
                return seat
        return None

    def _result_seat(self, index: int, axis: str) -> tuple[int, Placement] | None:
        """The seat that a gradient's parameter, as it is stored, gives an axis."""
        argument = self._argument_of(self.results[index])
        if argument is None:
            return None
        for dim, placements in enumerate(self._stored(argument).dims):
            for placement in placements:
                if placement.axis == axis:
                    return dim, placement
        return None

    def _seat_at(
        self, user: AtenOp, index: int, axis: str, depth: int
    ) -> tuple[int, Placement] | None:
        rule = rule_of(user)
        for other, dims in zip(user.operands, rule.operands, strict=True):
            known = self.flow.versions.get(other)
            if known is None or other is user.operands[index] or other in self.flow.pinned:
                continue
            for names, placements in zip(dims, known[0].dims, strict=True):
                for placement in placements:
                    if placement.axis == axis:
                        seat = seat_of(rule, names, placement)
                        return self._on_operand(user, index, seat, placement)
        if len(user.results) != 1 or index not in rule.linear:
            return None
        below = (
            self._annotated_seat(user, axis)
            if "sharding" in user.properties
            else self._wanted_seat(user.results[0], axis, depth - 1)
        )
        if below is None:
            return None
        seat = seat_of(rule, rule.results[0][below[0]], below[1])
        return self._on_operand(user, index, seat, below[1])

    def _annotated_seat(self, user: AtenOp, axis: str) -> tuple[int, Placement] | None:
        """The seat that a plan gives an axis in a result; nothing below it is wanted then."""
        goal = annotated(user, self.program)[0]
        for dim, placements in enumerate(goal.dims if goal is not None else ()):
            for placement in placements:
                if placement.axis == axis:
                    return dim, placement
        return None

    @staticmethod
    def _on_operand(
        user: AtenOp, index: int, seat: tuple[int, int] | None, placement: Placement
    ) -> tuple[int, Placement] | None:
        """A factor's seat as a placement of an operand's dim."""
        if seat is None:
            return None
        rule = rule_of(user)
        cuts: list[DimSharding] = [()] * len(rule.factors)
        cuts[seat[0]] = (Placement(placement.axis, placement.size, seat[1]),)
        for dim, placements in enumerate(dims_of(rule, rule.operands[index], cuts)):
            if placements:
                return dim, placements[0]
        return None

    # Backward

    def _backward(self) -> bool:
        """One sweep against program order; whether it changed anything."""
        changed = False
        for op in reversed(self.ops):
            for index, result in enumerate(op.results):
                wanted = self._wanted_by_uses(result)
                if wanted is not None and self._remake(op, index, wanted):
                    changed = True
        for argument in self.free:
            wanted = self._wanted_by_uses(argument)
            if wanted is not None:
                self.flow.versions[argument][0] = wanted
                changed = True
        return changed

    def _wanted_by_uses(self, value: SSAValue) -> Sharding | None:
        """The finer sharding that all uses of a value agree on; None if there is none."""
        now = self.flow.sharding(value)
        if now.unreduced:
            return None
        wanted: Sharding | None = None
        for use in value.uses:
            if not isinstance(use.operation, AtenOp):
                return None
            one = self.choices[use.operation].operands[use.index]
            if wanted is not None and one != wanted:
                return None
            wanted = one
        if wanted is None or wanted == now or wanted.unreduced:
            return None
        finer = all(set(old) <= set(new) for old, new in zip(now.dims, wanted.dims, strict=True))
        return wanted if finer else None

    def _remake(self, op: AtenOp, index: int, wanted: Sharding) -> bool:
        """Let an op produce a result in the wanted shards, if that costs slices at most."""
        if annotated(op, self.program)[index] is not None:
            return False
        goals: list[Sharding | None] = [self.flow.sharding(r) for r in op.results]
        goals[index] = wanted
        choice = self.flow.choose(op, goals)
        if choice.results[index] != wanted:
            return False
        if self._spoils_larger(op, index, choice):
            return False
        for operand, needed in zip(op.operands, choice.operands, strict=True):
            price = price_of(self.flow.mesh, self.flow.operand(operand), needed)
            if price is None or price[0] > 0:
                return False
        self.choices[op] = choice
        self.flow.versions[op.results[index]][0] = wanted
        return True

    def _spoils_larger(self, op: AtenOp, index: int, choice: Choice) -> bool:
        """Whether a larger result would come in shards that its uses do not want.

        The statistics of a norm must not bring its output to where it has to be gathered.
        """
        size = prod(shape_of(op.results[index]))
        return any(
            prod(shape_of(result)) > size
            and produced != self.flow.sharding(result)
            and produced != self._wanted_by_uses(result)
            for result, produced in zip(op.results, choice.results, strict=True)
        )

    # The result

    def _stored(self, argument: SSAValue) -> Sharding:
        """How an argument is stored: as annotated, or as its uses want it."""
        if argument in self.free:
            return self.flow.sharding(argument)
        return self.flow.stored[argument]

    def _argument_of(self, slot: Slot) -> SSAValue | None:
        """The argument whose sharding a result takes: a gradient's parameter, a buffer itself."""
        return self.arguments.get(("buffer" if slot.kind == "buffer" else "param", slot.name))

    def _annotate(self) -> None:
        for op in self.ops:
            shapes = [shape_of(r) for r in op.results]
            shardings = [self.flow.sharding(r) for r in op.results]
            op.properties["sharding"] = sharding_property(shardings, shapes)
        given: dict[int, Attribute | None] = {
            index: ShardingAttr.of(self._stored(slot.value), shape_of(slot.value))
            for index, slot in enumerate(self.program.arguments)
        }
        self.program.set_argument_attributes("dist.sharding", given)
        results: dict[int, Attribute | None] = {}
        for index, slot in enumerate(self.results):
            if slot.sharding_attr is None:
                argument = self._argument_of(slot)
                found = self._stored(argument) if argument else self.flow.sharding(slot.value)
                whole = found.whole()
                results[index] = ShardingAttr.of(whole, shape_of(slot.value))
        self.program.set_result_attributes("dist.sharding", results)


def _placed(
    sharding: Sharding, dim: int, placement: Placement, shape: tuple[int, ...]
) -> Sharding | None:
    """The sharding with one more placement; None if it does not fit."""
    dims = list(sharding.dims)
    dims[dim] = ordered((*dims[dim], placement))
    if placement.axis in sharding.placed_axes or not fits(dims[dim], shape[dim]):
        return None
    return Sharding(tuple(dims), sharding.unreduced, sharding.reduction)


def _summed_axes(rule: Rule, operands: Sequence[Sharding]) -> set[str]:
    """The axes that cut a factor which the first result lacks."""
    kept = {factor for factors in rule.results[0] for factor in factors}
    found: set[str] = set()
    for dims, sharding in zip(rule.operands, operands, strict=True):
        for factors, placements in zip(dims, sharding.dims, strict=True):
            for placement in placements:
                seat = seat_of(rule, factors, placement)
                if seat is not None and seat[0] not in kept:
                    found.add(placement.axis)
    return found
