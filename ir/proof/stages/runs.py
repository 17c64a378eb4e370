"""Check a pipeline schedule: an earlier run must produce each value that a run reads.

The producer of a value, and the sender of a message, are found by name, so that each name may have
only one. A value read over all micro-batches must be produced once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xdsl.ir import SSAValue

from shardweave.ir.dialects.dist import RecvOp, RunOp, SendOp
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import (
    HELD,
    ONCE,
    Run,
    StageFunction,
    StagePlaces,
    functions_of,
    micro_axis,
)
from shardweave.ir.proof.ops import ProofError

EACH = ("forward", "backward", "inputs", "weights")
"""The directions that run for each micro-batch."""


@dataclass
class RunOrder:
    """The order of runs, and the producer of each value that a stage function reads.

    givers: producers by stage and name. senders, receivers: by source, destination and message.
    """

    program: Program
    functions: dict[str, StageFunction]
    givers: dict[tuple[int, str], tuple[StageFunction, Slot]] = field(
        default_factory=dict[tuple[int, str], tuple[StageFunction, Slot]]
    )
    senders: dict[tuple[int, int, str], tuple[StageFunction, SendOp]] = field(
        default_factory=dict[tuple[int, int, str], tuple[StageFunction, SendOp]]
    )
    receivers: dict[tuple[int, int, str], tuple[StageFunction, RecvOp]] = field(
        default_factory=dict[tuple[int, int, str], tuple[StageFunction, RecvOp]]
    )

    @staticmethod
    def of(program: Program) -> RunOrder:
        """Read a staged program. Raises ProofError if two functions produce or send one name."""
        order = RunOrder(program, functions_of(program))
        for name, function in order.functions.items():
            if function.direction not in (*ONCE, *EACH):
                raise ProofError(
                    f"stage function @{name} has none of the names {', '.join((*ONCE, *EACH))}."
                )
            order._read(function)
        return order

    def _read(self, function: StageFunction) -> None:
        stage, name = function.stage, function.name
        for slot in function.results:
            if slot.kind in HELD:
                other = self.givers.setdefault((stage, slot.name), (function, slot))
                if other[1] is not slot:
                    raise ProofError(
                        f"@{name} and @{other[0].name} both return '{slot.name}'; keep one of them."
                    )
        for op in function.ops:
            if isinstance(op, SendOp):
                key = stage, op.to, op.message
                if self.senders.setdefault(key, (function, op))[1] is not op:
                    raise ProofError(
                        f"@{name} sends '{op.message}' to stage {op.to} twice; send it once."
                    )
            elif isinstance(op, RecvOp):
                key = op.source, stage, op.message
                if self.receivers.setdefault(key, (function, op))[1] is not op:
                    raise ProofError(
                        f"@{name} receives message '{op.message}' a second time; receive it once."
                    )

    def giver(self, function: StageFunction, slot: Slot) -> tuple[StageFunction, SSAValue]:
        """Return the function that returns an argument's value, and the value; ProofError if
        none."""
        entry = self.givers.get((function.stage, slot.name))
        if entry is None or entry[1].kind != slot.kind:
            raise ProofError(
                f"stage function @{function.name} reads {slot.kind} '{slot.name}', but no "
                f"function of stage {function.stage} returns a {slot.kind} of that name; return "
                "it, or remove the argument."
            )
        return entry[0], entry[1].value

    def sender(self, function: StageFunction, op: RecvOp) -> tuple[StageFunction, SSAValue]:
        """Return the function that sends a received message, and its value; ProofError if none."""
        entry = self.senders.get((op.source, function.stage, op.message))
        if entry is None or entry[0].is_once != function.is_once:
            raise ProofError(
                f"stage function @{function.name} receives message '{op.message}', but no "
                f"function of stage {op.source} sends it once for each receive; add a dist.send "
                "of that name."
            )
        return entry[0], entry[1].operands[0]

    def in_order(self) -> list[StageFunction]:
        """Return the functions in order of their first run. Raises ProofError, naming the run, if a
        run is repeated or reads a value not yet produced."""
        check = _Check(self)
        for op in self.program.ops:
            if not isinstance(op, RunOp):
                raise ProofError(
                    f"@step may hold dist.run ops only, found {op.name}; move it to a stage."
                )
            check.run(Run.of(op))
        check.ends()
        return [self.functions[name] for name in dict.fromkeys(name for name, _ in check.done)]


class _Check:
    """Checks runs in order. done: the runs so far, as (function, micro-batch), or (function, stage
    coordinate) for a function that runs once."""

    def __init__(self, schedule: RunOrder) -> None:
        self.schedule = schedule
        functions, program = schedule.functions, schedule.program
        for op in program.ops:
            if isinstance(op, RunOp) and op.function not in functions:
                raise ProofError(f"dist.run calls @{op.function}, which the program does not have.")
        axis = micro_axis(program)
        self.num_batches = axis.size if axis else 1
        self.num_places = program.needed_mesh().num_stages
        self.places = StagePlaces.of(program)
        self.with_batches = {(stage, at) for (stage, _), at in self.places.of_batch.items()}
        self.reads = {name: list(self._reads(function)) for name, function in functions.items()}
        self.done: dict[tuple[str, int], None] = {}
        self.last: dict[str, int] = {}
        """Last micro-batch by function, num_batches if out of order. times: number of runs."""
        self.times: dict[str, int] = {}

    def _reads(self, function: StageFunction) -> Iterator[tuple[str, str, StageFunction]]:
        """Yield kind, name and producer of each value that a function reads from others."""
        for slot in function.arguments:
            if slot.kind in HELD:
                yield slot.kind, slot.name, self.schedule.giver(function, slot)[0]
        for op in function.ops:
            if isinstance(op, RecvOp):
                yield "message", op.message, self.schedule.sender(function, op)[0]

    def run(self, run: Run) -> None:
        function = self.schedule.functions[run.function]
        number = self._number(run, function)
        for kind, name, giver in self.reads[run.function]:
            if not self._is_made(kind, run, function, giver):
                which = "" if run.micro_batch is None else f" on micro-batch {number}"
                raise ProofError(
                    f"stage function @{run.function}{which} reads {kind} '{name}' before it is "
                    f"computed; run @{giver.name} earlier."
                )
        if (run.function, number) in self.done:
            raise ProofError(f"the step runs @{run.function} twice for {number}; run it once.")
        self.done[run.function, number] = None
        if run.micro_batch is not None:
            self.times[run.function] = self.times.get(run.function, 0) + 1
            in_order = self.last.get(run.function, -1) == run.micro_batch - 1
            self.last[run.function] = run.micro_batch if in_order else self.num_batches

    def ends(self) -> None:
        """Raise ProofError if a once-per-step function skips a coordinate of its stage."""
        for name, function in self.schedule.functions.items():
            at = {number for other, number in self.done if other == name}
            if at and function.is_once and at != set(self.places.of_stage[function.stage]):
                places = ", ".join(map(str, self.places.of_stage[function.stage]))
                raise ProofError(f"@{name} must run at each coordinate of its stage: {places}.")

    def _number(self, run: Run, function: StageFunction) -> int:
        """Return a run's micro-batch, or its coordinate if its function runs once in a step."""
        number = run.micro_batch
        if (number is None) != function.is_once or not 0 <= (number or 0) < self.num_batches:
            raise ProofError(
                f"dist.run of @{run.function} has micro_batch={number}; expected an index below "
                f"{self.num_batches} for a function that runs for each micro-batch, and none for "
                "a function that runs once."
            )
        at = run.at if number is None else self.places.of_batch[function.stage, number]
        if at != run.at or not 0 <= at < self.num_places:
            raise ProofError(
                f"dist.run of @{run.function} has at={run.at}, expected at={at}, one of the "
                f"{self.num_places} coordinates of the stage axis."
            )
        return at if number is None else number

    def _is_made(self, kind: str, run: Run, function: StageFunction, giver: StageFunction) -> bool:
        """True if earlier runs of `giver` produced a value of this kind for `run`."""
        number = run.micro_batch
        if kind == "whole":
            return giver.is_once and (giver.name, run.at) in self.done
        if kind == "message":
            source = self.places.source(giver.stage, None) if number is None else number
            return (giver.name, source) in self.done
        if giver.is_once or (kind == "kept") != (number is not None):
            return False
        if number is not None:
            return (giver.name, number) in self.done
        has_some = (function.stage, run.at) in self.with_batches
        all_there = self.times.get(giver.name, 0) == self.num_batches
        in_order = kind != "part" or self.last.get(giver.name) == self.num_batches - 1
        return has_some and all_there and in_order
