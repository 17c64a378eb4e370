"""Do the functions of stages fit together, and can all ranks run the schedule to its end?

The runs of a staged step stand in an order in which one process could run them all. Ranks run
theirs in that order, and sending waits for nobody; so if each run finds what it reads made before
it, no rank ever waits for what comes later, and none can deadlock. Linear in ops and runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xdsl.ir import Operation, OpResult, SSAValue

from shardweave.ir.annotations import sharding_attrs_of
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.dist import RecvOp, SendOp
from shardweave.ir.program import Program, Slot
from shardweave.ir.staged import HELD, Run, StageFunction, functions_of, micro_axis, runs_of

Place = Operation | SSAValue | None
Message = tuple[int, int, str]
"""The stages that it goes from and to, and its name."""

ONCE = ("before", "share", "after")
"""What runs once in a step."""


@dataclass(eq=False)
class _Read:
    """What a function takes and gives, by name."""

    function: StageFunction
    sends: dict[Message, SendOp] = field(default_factory=dict[Message, SendOp])
    receives: dict[Message, RecvOp] = field(default_factory=dict[Message, RecvOp])
    takes: dict[str, Slot] = field(default_factory=dict[str, Slot])
    gives: dict[str, Slot] = field(default_factory=dict[str, Slot])

    @staticmethod
    def of(function: StageFunction) -> _Read:
        found = _Read(function)
        for op in function.ops:
            if isinstance(op, SendOp):
                found.sends[function.stage, op.to, op.message] = op
            elif isinstance(op, RecvOp):
                found.receives[op.source, function.stage, op.message] = op
        found.takes = {slot.name: slot for slot in function.arguments if slot.kind in HELD}
        found.gives = {slot.name: slot for slot in function.results if slot.kind in HELD}
        return found


def problems_of_stages(program: Program) -> Iterator[tuple[str, Place]]:
    """The problems of a staged program whose functions are well formed by themselves."""
    reads = {name: _Read.of(function) for name, function in functions_of(program).items()}
    found = [*_messages(reads), *_runs(program, reads)]
    yield from found
    if not found:
        yield from _order(program, reads)


# Messages


def _messages(reads: Mapping[str, _Read]) -> Iterator[tuple[str, Place]]:
    """Each message is sent once and received once, as the same type in the same shards."""
    senders: dict[Message, tuple[str, SendOp]] = {}
    for name, read in reads.items():
        for key, op in read.sends.items():
            if key in senders:
                yield f"@{name}: {_named(key)} is sent by @{senders[key][0]} too.", op
            senders[key] = name, op
    for name, read in reads.items():
        for key, op in read.receives.items():
            if key not in senders:
                yield f"@{name}: nobody sends {_named(key)}; add a dist.send of that name.", op
                continue
            other, send = senders.pop(key)
            there, here = _form(send.operands[0], reads[other]), _form(op.results[0], read)
            if there != here:
                yield (
                    (
                        f"@{name}: {_named(key)} is received as {_text(here)}, but @{other} sends "
                        f"{_text(there)}; make them equal."
                    ),
                    op,
                )
    for key, (name, op) in senders.items():
        yield f"@{name}: nobody receives {_named(key)}; add a dist.recv of that name.", op


def _form(value: SSAValue, read: _Read) -> tuple[object, ShardingAttr | None]:
    """Type and sharding of a value."""
    if isinstance(value, OpResult):
        attributes = sharding_attrs_of(value.op)
        return value.type, attributes[value.index] if attributes else None
    slots = {slot.value: slot for slot in read.function.arguments}
    return value.type, slots[value].sharding_attr


def _text(form: tuple[object, ShardingAttr | None]) -> str:
    return f"{form[0]} in {form[1] or 'no shards'}"


def _named(key: Message) -> str:
    return f"'{key[2]}' from stage {key[0]} to {key[1]}"


# Runs


def _runs(program: Program, reads: Mapping[str, _Read]) -> Iterator[tuple[str, Place]]:
    """Each function runs as often as it should, on the ranks of its stage."""
    axis, ranks = micro_axis(program), program.needed_mesh().num_stages
    count = axis.size if axis else 1
    places: dict[int, int] = {}
    times: Counter[Run] = Counter()
    for op, run in runs_of(program):
        if run.function not in reads:
            yield f"dist.run: there is no @{run.function}.", op
            continue
        function = reads[run.function].function
        number = run.micro_batch
        if (number is None) != (function.direction in ONCE) or not -1 < (number or 0) < count:
            yield f"dist.run of @{run.function}: micro_batch is {number}, of {count}.", op
        place = places.setdefault(function.stage, run.at)
        if place != run.at or not 0 <= place < ranks:
            yield (
                (
                    f"dist.run of @{run.function}: stage {function.stage} is at {place} of "
                    f"{ranks}, not at {run.at}."
                ),
                op,
            )
        times[run] += 1
    for name, read in reads.items():
        numbers = [None] if read.function.direction in ONCE else list(range(count))
        for number in numbers:
            found = times[Run(name, places.get(read.function.stage, 0), number)]
            if found != 1:
                which = "" if number is None else f" on micro-batch {number}"
                yield f"@{name} runs {found} times{which}, expected once.", read.function.function


# Order


def _order(program: Program, reads: Mapping[str, _Read]) -> Iterator[tuple[str, Place]]:
    """Each run finds what it reads: made by an earlier run."""
    sent: set[tuple[Message, int | None]] = set()
    made: dict[tuple[int, str, int | None], Slot] = {}
    counts: Counter[tuple[int, str]] = Counter()
    axis = micro_axis(program)
    for op, run in runs_of(program):
        read = reads[run.function]
        stage, number = read.function.stage, run.micro_batch
        what = f"@{run.function}" + ("" if number is None else f" of micro-batch {number}")
        for key in read.receives:
            if (key, number) not in sent:
                yield f"{what} waits for {_named(key)}, which is sent behind it.", op
        for name, slot in read.takes.items():
            where = number if slot.kind == "kept" else None
            giver = made.get((stage, name, where))
            is_there = giver is not None and giver.value.type == slot.value.type
            if slot.kind in ("sum", "part", "same"):
                is_there = counts[stage, name] == (axis.size if axis else 1)
            if not is_there:
                yield f"{what} reads {slot.kind} '{name}', which no earlier run gives so.", op
        sent.update((key, number) for key in read.sends)
        for name, slot in read.gives.items():
            made[stage, name, number if slot.kind == "kept" else None] = slot
            counts[stage, name] += 1
