"""The walk over a program of stages: each function's body once, for all its micro-batches.

Micro-batches form one more mesh axis, along which no rank can send. An input that a function reads
is sharded over this axis, at the coordinate of the run. So are the values computed from it; sums
over samples are unreduced over the axis. Functions of one micro-batch run at the same coordinate,
so that a value kept or sent has the same relation at its reader. Adding the terms of all
micro-batches is a reduction over the axis, and joining their shards is a gather.
"""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.ir import SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import describe
from shardweave.ir.dialects.dist import RecvOp, RunOp, SendOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import Placement, block_of
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import HELD, TOTALS, StageFunction, StagePlaces, micro_axis
from shardweave.ir.proof.diagnose import explain_given
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.relations.digits import cut
from shardweave.ir.proof.relations.held import (
    ProofAxes,
    RankNumber,
    Relation,
    Value,
    concatenated,
    reduced_over,
)
from shardweave.ir.proof.signature import argument_of, is_declared
from shardweave.ir.proof.stages.runs import RunOrder
from shardweave.ir.proof.walk import Walk

STATE = ("param", "buffer", "input", "tangent")
RETURNED = ("output", "grad", "buffer")


def axes_of_stages(program: Program) -> ProofAxes:
    return ProofAxes(Mesh(axis for axis in program.needed_mesh().axes if axis.kind != "stage"))


def relate_stages(program: Program, walk: Walk) -> list[tuple[Program, Slot]]:
    """Relate all values of a program of stages. Returns the results of the step, each with the
    function that returns it, for comparison with the global program.

    Raises ProofError for a schedule in which a run reads a value not yet produced, and for values
    of micro-batches that do not combine to the declared total.
    """
    stages = _Stages(program, walk)
    for function in stages.schedule.in_order():
        stages.function(function)
    stages.check_step()
    return stages.returned


class _Stages:
    def __init__(self, program: Program, walk: Walk) -> None:
        self.program = program
        self.mesh = program.needed_mesh()
        self.walk = walk
        self.schedule = RunOrder.of(program)
        self.places = StagePlaces.of(program)
        self.micro: Axis | None = micro_axis(program)
        self.slots = {(slot.kind, slot.name): slot for slot in program.arguments}
        self.returned: list[tuple[Program, Slot]] = []

    def function(self, function: StageFunction) -> None:
        """Relate one stage function's values, after the functions that produce its arguments."""
        for slot in function.arguments:
            self.walk.values[slot.value] = self._argument(function, slot)
        for op in function.ops:
            if isinstance(op, RecvOp):
                message = op.source, function.stage, op.message
                self.walk.links[op.results[0]] = self.schedule.sent[message]
            elif isinstance(op, dist.DistOp) and not isinstance(op, SendOp):
                self._check_axes(function, op)
        self.walk.block(function.function.body.block.ops)
        for slot in function.results:
            if slot.kind in RETURNED and function.is_once:
                self.returned.append((function, slot))
            elif slot.kind not in HELD:
                raise ProofError(
                    f"stage function @{function.name} runs for each micro-batch, but returns "
                    f"{slot.kind} '{slot.name}'; only a function that runs once in a step may "
                    "return it."
                )

    def _check_axes(self, function: StageFunction, op: dist.DistOp) -> None:
        within = [axis.name for axis in self.mesh.space_axes]
        if isinstance(op, RunOp) or not set(op.axes) <= set(within):
            raise ProofError(
                f"stage function @{function.name}: {describe(op)} communicates over "
                f"{', '.join(op.axes)}, but ranks of one stage can communicate over "
                f"{', '.join(within)} only; remove the other axes."
            )

    # What a function takes

    def _argument(self, function: StageFunction, slot: Slot) -> Value:
        if slot.kind in STATE:
            return self._state(function, slot)
        if slot.kind == "micro_batch":
            return self._number(function, slot)
        giver, value = self.schedule.giver(function, slot)
        self.walk.links[slot.value] = value
        argument: Value | None = self.walk.values[value]
        if slot.kind in TOTALS:
            (given,) = [
                out for out in giver.results if out.value is value and out.name == slot.name
            ]
            argument = self._total(function, slot, given, giver)
        elif slot.kind == "whole" and self._seat(function, slot) is not None:
            argument = self._part(function, slot, value)
        elif value.type != slot.value.type:
            argument = None
        if argument is None:
            raise ProofError(explain_given(self.walk, giver.name, function.name, slot, value))
        return argument

    def _state(self, function: StageFunction, slot: Slot) -> Value:
        """Relate a parameter, buffer, input or tangent; an input is a shard by micro-batch."""
        whole = self.slots.get((slot.kind, slot.name))
        sharding = function.sharding_of_slot(slot)
        own = () if self.micro is None or function.is_once else (self.micro.name,)
        if (
            whole is None
            or sharding.without(own) != self.program.sharding_of_slot(whole)
            or dtype_of_value(whole.value) != dtype_of_value(slot.value)
        ):
            raise ProofError(
                f"stage function @{function.name} takes {slot.kind} '{slot.name}' in another "
                "sharding or dtype than @step does; give both the same."
            )
        return argument_of(self.walk.table, function, slot)

    def _number(self, function: StageFunction, slot: Slot) -> Value:
        """Relate the argument that holds the index of the micro-batch."""
        if function.is_once or self.micro is None or shape_of(slot.value):
            raise ProofError(
                f"@{function.name} takes a micro-batch index, but runs once in a step."
            )
        terms = ((self.micro.name, 1),) if self.micro.size > 1 else ()
        return RankNumber(terms)

    def _seat(self, function: StageFunction, slot: Slot) -> tuple[int, Placement] | None:
        """Dim and placement by which micro-batches shard an argument; None if they do not."""
        if self.micro is None or function.is_once:
            return None
        return function.sharding_of_slot(slot).seat_of(self.micro.name)

    def _part(self, function: StageFunction, slot: Slot, value: SSAValue) -> Value | None:
        """Relate an argument that is one micro-batch's slice of `value`; None if it is not."""
        whole, seat = self.walk.values[value], self._seat(function, slot)
        if not isinstance(whole, Relation) or seat is None:
            return None
        dim, placement = seat
        block = block_of(function.sharding_of_slot(slot).dims[dim], placement)
        held = cut(whole.held, [(placement.axis, placement.size)], dim, block)
        if held is None or dtype_of_value(value) != dtype_of_value(slot.value):
            return None
        return whole.with_held(held) if held.local_shape == shape_of(slot.value) else None

    def _total(
        self, function: StageFunction, slot: Slot, given: Slot, giver: StageFunction
    ) -> Value | None:
        """Reduce or gather a value over all micro-batches, by the kind of `slot`; None on error."""
        value = self.walk.values[given.value]
        if not isinstance(value, Relation):
            return None
        held, sharding = value.held, giver.sharding_of_slot(given)
        name = self.micro.name if self.micro else ""
        if slot.kind == "same":
            total = None if name in held.sharding.axes else held
        elif held.layout is not None or not is_declared(held.sharding, sharding):
            total = None
        elif slot.kind == "sum":
            is_one = name not in held.sharding.unreduced and (
                not self.micro or self.micro.size == 1
            )
            total = held if is_one else reduced_over(held, [name])
            if len(self.places.of_stage[function.stage]) > 1:
                # Coordinates of a stage put their totals together as the one who reads them says.
                reads = function.sharding_of_slot(slot).reduction
                total = total if reads == held.sharding.reduction else None
        else:
            seat = sharding.seat_of(name)
            block = seat and block_of(sharding.dims[seat[0]], seat[1])
            total = seat and concatenated(held, [name], seat[0], block)
        if total is None or dtype_of_value(given.value) != dtype_of_value(slot.value):
            return None
        return value.with_held(total) if total.local_shape == shape_of(slot.value) else None

    # The step

    def check_step(self) -> None:
        """Raise ProofError unless the step returns exactly the results of its functions."""
        made = {result: slot for op in self.program.ops for result, slot in self._results(op)}
        declared = {(slot.kind, slot.name) for slot in self.program.results}
        for _, slot in self.returned:
            if (slot.kind, slot.name) not in declared:
                raise ProofError(
                    f"@step must return {slot.kind} '{slot.name}', which a stage returns."
                )
        for slot in self.program.results:
            own = made.get(slot.value)
            if (
                own is None
                or (own[1].kind, own[1].name) != (slot.kind, slot.name)
                or own[0].sharding_of_slot(own[1]) != self.program.sharding_of_slot(slot)
                or own[1].value.type != slot.value.type
            ):
                raise ProofError(
                    f"the function @step returns {slot.kind} '{slot.name}', but no stage "
                    "function returns it with this kind, name, type and sharding; return what a "
                    "stage function returns."
                )

    def _results(self, op: object) -> Iterator[tuple[object, tuple[StageFunction, Slot]]]:
        assert isinstance(op, RunOp)
        function = self.schedule.functions[op.function]
        slots = [slot for slot in function.results if slot.kind in RETURNED]
        if op.results and len(op.results) != len(slots):
            raise ProofError(
                f"dist.run of @{op.function} has {len(op.results)} results, but the function "
                f"returns {len(slots)}; give it as many."
            )  # fmt: skip
        for result, slot in zip(op.results, slots, strict=False):
            yield result, (function, slot)
