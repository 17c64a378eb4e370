"""Propagation: shardings of a few values are completed to all ops, and every reshard is inserted.

`propagate` walks a global program forward, in program order: each op is sharded over the axes of
its operands; conflicts go by priority (wishes, which are shardings that the plan or the user asks
for, then the larger tensor). A partial sum passes through linear ops while it has a single use; the
first op that needs its total all-reduces it, or reduce-scatters it if it reads shards. Then
propagation walks backward, to a fixed point: a value that all uses read in shards, and that can be
computed in shards for free, is sharded (masks, constants, biases); parameters without annotation
adopt the sharding that their uses read. Then reshards that several uses need are moved to the value
that they share (`shared_wishes`). `place_reshards` writes the choices into the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from xdsl.ir import Attribute, SSAValue

from shardweave.ir.dialects.annotations import sharding_attrs_of, wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import whole_axis
from shardweave.ir.mesh.placement import Placement, Sharding, fits, ordered
from shardweave.ir.program.program import Program, Slot, wishes_of
from shardweave.ir.sharding.assignment import Assignment, price_of
from shardweave.ir.sharding.flow import Flow, aten_ops, is_propagated
from shardweave.ir.sharding.rules import notes_on_rules
from shardweave.passes.notes import is_heard, note
from shardweave.passes.partition.place_reshards import Chosen, place_reshards
from shardweave.passes.partition.shared_wishes import SharedWishes
from shardweave.passes.partition.wanted_seats import WantedSeats
from shardweave.passes.program_pass import Analyses, PassWithAnalyses

MAX_SWEEPS = 100
"""Limit of backward sweeps, against an endless loop. Each sweep makes shards finer, so that they
should end; models need two or three."""


def propagated_forward(program: Program) -> Propagation:
    """Propagate a program's shardings forward only. Raises ValueError without a mesh."""
    propagation = Propagation(program)
    propagation.forward()
    return propagation


def propagate(program: Program, analyses: Analyses | None = None) -> None:
    """Give every op of a global program its sharding, and add a reshard where a value changes it.

    Afterwards each op's operands fit its rule, arguments and results carry `dist.sharding`, and no
    wish (`wanted`) is left. A propagated program stays as it is. analyses: analyses of the program
    as it is. Raises ValueError without a mesh, for a program with ops outside the aten dialect, and
    for wishes that do not fit. Takes time linear in the ops.
    """
    program.needed_mesh()
    if program.is_local:
        raise ValueError(
            "the program is local, so that it is partitioned already; run propagate-shardings "
            "once, on the global program."
        )
    if not is_propagated(program):
        analyses = analyses or Analyses(program)
        propagation = analyses.of(propagated_forward)
        propagation.backward()
        propagation.write()
        analyses.forget()


class Propagation:
    """The state of one propagation: each op's assignment, and the shardings of values so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow = Flow(program)
        self.ops = aten_ops(program)
        self.wishes = {op: wishes_of(op, program) for op in self.ops}
        self.assignments: dict[AtenOp, Assignment] = {}
        slots = program.arguments
        self.arguments = {(slot.kind, slot.name): slot.value for slot in slots}
        self.free = dict.fromkeys(
            s.value for s in slots if s.sharding_attr is None and s.kind != "tangent"
        )
        self.seats = WantedSeats(self.flow, program.results, self._stored_for)

    # Forward

    def forward(self) -> None:
        """Assign axes in every op, in program order."""
        for op in self.ops:
            wishes = self.wishes[op]
            assignment = self.flow.assign(op, wishes, self.seats.hints(op))
            self.assignments[op] = assignment
            for operand, wanted in zip(op.operands, assignment.operands, strict=True):
                self.flow.use(operand, wanted)
            shardings = [
                self._settled(result, produced) if wish is None else wish
                for result, produced, wish in zip(
                    op.results, assignment.results, wishes, strict=True
                )
            ]
            self.flow.define(op, shardings)

    def _settled(self, result: SSAValue, produced: Sharding) -> Sharding:
        """The sharding to keep for a result; a partial sum with several uses is reduced at once."""
        if not produced.unreduced or result.has_one_use() or result.first_use is None:
            return produced
        settled = produced.whole()
        if produced.reduction == "sum":
            for axis in produced.unreduced:
                seat = self.seats.of(result, axis)
                if seat is not None:
                    settled = _placed(settled, *seat, shape_of(result)) or settled
        return settled

    # Backward

    def backward(self) -> None:
        """Sweep against program order until nothing changes; then pass wishes on to producers."""
        for _ in range(MAX_SWEEPS):
            if not self._backward():
                break
        else:
            raise AssertionError(
                f"propagation still changes after {MAX_SWEEPS} sweeps. This is a defect of "
                "shardweave: report the plan, and shard fewer of its parameters until it is mended."
            )
        shared = SharedWishes(self.flow, self.assignments, self.wishes, self._returned)
        shared.travel(self.ops, self.program.return_op.operands)

    def _backward(self) -> bool:
        """Sweep once against program order; returns whether anything changed."""
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
        """A value's sharding with the further axes that all its uses shard it over; None if they
        differ or add none. Axes that uses gather stay: gathers of finer shards send less."""
        now = self.flow.sharding(value)
        if now.unreduced:
            return None
        wanted: Sharding | None = None
        for use in value.uses:
            op = use.operation
            is_op = isinstance(op, AtenOp)
            read = self.assignments[op].operands[use.index] if is_op else self._returned(use.index)
            if read is None or read.unreduced:
                return None
            pairs = zip(now.dims, read.dims, strict=True)
            dims = [(*old, *(p for p in new if p.axis not in now.axes)) for old, new in pairs]
            finer = Sharding(tuple(map(ordered, dims)))
            if wanted not in (None, finer) or not all(map(fits, finer.dims, shape_of(value))):
                return None
            wanted = finer
        return None if wanted == now else wanted

    def _remake(self, op: AtenOp, index: int, wanted: Sharding) -> bool:
        """Let an op produce a result in `wanted` if no operand needs a message; True if it does."""
        if self.wishes[op][index] is not None:
            return False
        goals: list[Sharding | None] = [self.flow.sharding(r) for r in op.results]
        goals[index] = wanted
        assignment = self.flow.assign(op, goals)
        if assignment.results[index] != wanted:
            return self._scatter(op, index, wanted)
        if self._spoils_larger(op, index, assignment):
            return False
        for operand, needed in zip(op.operands, assignment.operands, strict=True):
            price = price_of(self.flow.mesh, self.flow.operand(operand), needed)
            if price is None or price[0] > 0:
                return False
        self.assignments[op] = assignment
        self.flow.versions[op.results[index]][0] = wanted
        return True

    def _scatter(self, op: AtenOp, index: int, wanted: Sharding) -> bool:
        """Reduce-scatter a partial sum to `wanted` if that is cheaper than now; returns whether."""
        result, produced = op.results[index], self.assignments[op].results[index]
        if not produced.unreduced:
            return False
        made = self.flow.operand(result)._replace(versions=(produced,))
        now, then = (
            price_of(self.flow.mesh, made, s) for s in (self.flow.sharding(result), wanted)
        )
        if now is None or then is None or then >= now:
            return False
        self.flow.versions[result][0] = wanted
        return True

    def _spoils_larger(self, op: AtenOp, index: int, assignment: Assignment) -> bool:
        """True if `assignment` shards a larger result, as of a norm, in a way that no use wants."""
        size = prod(shape_of(op.results[index]))
        return any(
            prod(shape_of(result)) > size
            and produced != self.flow.sharding(result)
            and produced != self._wanted_by_uses(result)
            for result, produced in zip(op.results, assignment.results, strict=True)
        )

    # The result

    def _stored(self, argument: SSAValue) -> Sharding:
        """The stored sharding of an argument: as annotated, or as its uses want it."""
        if argument in self.free:
            return self.flow.sharding(argument)
        return self.flow.stored[argument]

    def _stored_for(self, slot: Slot) -> Sharding | None:
        """The stored sharding that a result takes: of a gradient's parameter, or of the buffer
        itself; None for other results."""
        kind = "buffer" if slot.kind == "buffer" else "param"
        argument = self.arguments.get((kind, slot.name))
        return None if argument is None else self._stored(argument)

    def _returned(self, index: int) -> Sharding | None:
        """The sharding in which a result is returned; None to keep its producer's."""
        slot = self.seats.result_slots[index]
        annotated = None if slot.sharding_attr is None else self.program.sharding_of_slot(slot)
        return annotated or self._stored_for(slot)

    def write(self) -> None:
        """Write chosen shardings and reshards into the program."""
        arguments: dict[int, Attribute | None] = {
            index: ShardingAttr.of(self._stored(slot.value), shape_of(slot.value))
            for index, slot in enumerate(self.program.arguments)
        }
        self.program.set_argument_attributes("dist.sharding", arguments)
        results: dict[int, Attribute | None] = {}
        for index, slot in enumerate(self.program.results):
            if slot.sharding_attr is None:
                kept = self._stored_for(slot) or self.flow.sharding(slot.value)
                results[index] = ShardingAttr.of(kept.whole(), shape_of(slot.value))
        self.program.set_result_attributes("dist.sharding", results)
        chosen = {
            op: Chosen(
                self.assignments[op],
                tuple(self.flow.sharding(result) for result in op.results),
                tuple(wish is not None for wish in self.wishes[op]),
            )
            for op in self.ops
        }
        place_reshards(self.program, chosen)


def _placed(
    sharding: Sharding, dim: int, placement: Placement, shape: tuple[int, ...]
) -> Sharding | None:
    """Return the sharding with `placement` added to dim `dim`; None if it does not fit."""
    placed = sharding.with_dim(dim, (*sharding.dims[dim], placement))
    is_free = placement.axis not in sharding.placed_axes
    return placed if is_free and fits(placed.dims[dim], shape[dim]) else None


@dataclass(frozen=True)
class PropagateShardingsPass(PassWithAnalyses):
    """Give every op its sharding, and put a `dist.reshard` wherever a value changes shards.

    `passes.partition.propagate_shardings` describes the choice, `place_reshards` the placement of
    reshards.

    Requires: a global program with a mesh; wishes, if any, in `wanted` and `dist.used`. Ensures:
    every op has `sharding` and operands that fit it, every argument and result `dist.sharding`; no
    wish is left; numerics unchanged. A propagated program stays as it is. Linear in the ops.
    """

    name = "propagate-shardings"

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        for text in _notes_on(program) if is_heard() else ():
            note(text)
        propagate(program, analyses)


def _notes_on(program: Program) -> Iterator[str]:
    """Notes on axes that no annotation names, and on ops without a rule."""
    idle = _idle_axes(program)
    if idle:
        yield (
            f"no value is annotated over {' and '.join(idle)}, so that its devices all compute "
            "the same; run apply-plan or plan-<planner> (plan-megatron) first, or annotate "
            "arguments."
        )
    if program.mesh is not None and program.mesh.num_devices > 1:
        yield from notes_on_rules(program.ops)


def _idle_axes(program: Program) -> list[str]:
    slots = (*program.arguments, *program.results)
    shardings = [
        a for s in slots for a in s.attributes.data.values() if isinstance(a, ShardingAttr)
    ]
    for op in program.ops:
        shardings += [*(sharding_attrs_of(op) or ()), *(wanted_attrs_of(op) or ())]
    used = {axis.data for s in shardings for axes in (*s.dims, s.unreduced) for axis in axes}
    axes = program.mesh.space_axes if program.mesh else ()
    wide = [
        axis for axis in axes if axis.size > 1 and not used & {axis.name, whole_axis(axis.name)}
    ]
    return [f"{axis.name}={axis.size}" for axis in wide]
