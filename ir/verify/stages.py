"""Verification of a staged program: its functions fit together, and its schedule cannot deadlock.

The runs of a staged step are listed in an order in which one process could execute them all. Each
rank executes its own runs in that order, and a send never blocks; so if each run reads only what
earlier runs made, no rank waits for a later run, and none can deadlock. If a stage is at several
coordinates, these wait for each other in functions that run once per step; so the runs of such a
function must be consecutive, as if they were one. Takes time linear in ops and runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from xdsl.ir import Operation, OpResult, SSAValue

from shardweave.ir.dialects.annotations import sharding_attrs_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.dist import RecvOp, SendOp, is_copied_back, is_on_host
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of, tensor_type_of, with_shape
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import (
    HELD,
    TOTALS,
    StageFunction,
    StagePlaces,
    functions_of,
    micro_axis,
    run_ops_of,
)

Place = Operation | SSAValue | None
Message = tuple[int, int, str]
"""A message's sending stage, receiving stage and name."""


@dataclass(eq=False)
class _Read:
    """Messages that a function sends and receives, and held values that it takes and gives."""

    function: StageFunction
    sends: Mapping[Message, SendOp]
    receives: Mapping[Message, RecvOp]
    takes: Mapping[str, Slot]
    gives: Mapping[str, Slot]

    @staticmethod
    def of(function: StageFunction) -> _Read:
        stage = function.stage
        return _Read(
            function,
            {(stage, op.to, op.message): op for op in function.sends},
            {(op.source, stage, op.message): op for op in function.receives},
            {slot.name: slot for slot in function.arguments if slot.kind in HELD},
            {slot.name: slot for slot in function.results if slot.kind in HELD},
        )


def problems_of_stages(program: Program) -> Iterator[tuple[str, Place]]:
    """Find problems between the functions of a staged program; each function is valid by itself."""
    reads = {name: _Read.of(function) for name, function in functions_of(program).items()}
    problems = [*_messages(reads), *_runs(program, reads)]
    yield from problems
    if not problems:
        problems = list(_together(program))
        yield from problems
    if not problems:
        yield from _order(program, reads)


# Messages


def _messages(reads: Mapping[str, _Read]) -> Iterator[tuple[str, Place]]:
    """Check that each message is sent and received once, with the same type and sharding."""
    senders: dict[Message, tuple[str, SendOp]] = {}
    for name, read in reads.items():
        for op in read.function.sends:
            key = read.function.stage, op.to, op.message
            if key in senders:
                yield f"@{name}: {_named(key)} is sent by @{senders[key][0]} too.", op
            senders[key] = name, op
    for name, read in reads.items():
        for op in read.function.receives:
            key = op.source, read.function.stage, op.message
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


def _form(value: SSAValue, read: _Read) -> tuple[object, ShardingAttr]:
    """Type and sharding of a value; for a kernel's result, of the value that the kernel yields.
    Without a noted sharding a value is replicated."""
    while isinstance(value, OpResult) and isinstance(value.op, FusedOp):
        value = value.op.yielded[value.index]
    if isinstance(value, OpResult):
        attributes = sharding_attrs_of(value.op)
        noted = attributes[value.index] if attributes else None
    else:
        noted = {slot.value: slot for slot in read.function.arguments}[value].sharding_attr
    shape = shape_of(value)
    return value.type, noted or ShardingAttr.of(Sharding.replicated(len(shape)), shape)


def _text(form: tuple[object, ShardingAttr]) -> str:
    return f"{form[0]} in {form[1]}"


def _named(key: Message) -> str:
    return f"'{key[2]}' from stage {key[0]} to {key[1]}"


# Runs


def _runs(program: Program, reads: Mapping[str, _Read]) -> Iterator[tuple[str, Place]]:
    """Check that each function runs the right number of times, at its stage's coordinates."""
    axis, ranks = micro_axis(program), program.needed_mesh().num_stages
    count = axis.size if axis else 1
    places: dict[int, set[int]] = {}
    batches: dict[tuple[int, int], int] = {}
    times: Counter[tuple[str, int]] = Counter()
    for op, run in run_ops_of(program):
        if run.function not in reads:
            yield f"dist.run: there is no @{run.function}.", op
            continue
        function = reads[run.function].function
        number = run.micro_batch
        if (number is None) != function.is_once or not -1 < (number or 0) < count:
            yield f"dist.run of @{run.function}: micro_batch is {number}, of {count}.", op
        if not 0 <= run.at < ranks:
            yield f"dist.run of @{run.function}: at is {run.at}, of {ranks}.", op
        if number is None:
            times[run.function, -1 - run.at] += 1
            continue
        times[run.function, number] += 1
        places.setdefault(function.stage, set()).add(run.at)
        place = batches.setdefault((function.stage, number), run.at)
        if place != run.at:
            yield (
                (
                    f"dist.run of @{run.function}: micro-batch {number} of stage "
                    f"{function.stage} is at {place}, not at {run.at}."
                ),
                op,
            )
    yield from _counts(reads, places, times, count)


def _counts(
    reads: Mapping[str, _Read],
    places: Mapping[int, Collection[int]],
    times: Mapping[tuple[str, int], int],
    count: int,
) -> Iterator[tuple[str, Place]]:
    """Check that each function runs once per micro-batch, or once per coordinate of its stage.
    times: number of runs by function and micro-batch, or by function and -1 - coordinate."""
    for name, read in reads.items():
        is_once = read.function.is_once
        own = {-1 - number for other, number in times if other == name}
        at = sorted(places.get(read.function.stage, own or {0}))
        expected = [-1 - place for place in at] if is_once else range(count)
        for number in expected:
            runs = times.get((name, number), 0)
            if runs != 1:
                which = f" at {-1 - number}" if is_once else f" on micro-batch {number}"
                yield f"@{name} runs {runs} times{which}, expected once.", read.function.function
        beside = sum(ran for (other, _), ran in times.items() if other == name) - len(expected)
        if is_once and beside > 0:
            where = ", ".join(map(str, at))
            yield f"@{name} runs where its stage is not; it is at {where}.", read.function.function


# Order


def _together(program: Program) -> Iterator[tuple[str, Place]]:
    """Check that nothing stands between a function's runs, if it runs once at each coordinate."""
    ended: set[str] = set()
    before = ""
    for op, run in run_ops_of(program):
        if run.micro_batch is None and run.function != before and run.function in ended:
            yield f"dist.run of @{run.function}: put it behind the other runs of the function.", op
        ended.add(before)
        before = run.function


def _order(program: Program, reads: Mapping[str, _Read]) -> Iterator[tuple[str, Place]]:
    """Check that earlier runs made every message and value that a run reads."""
    sent: set[tuple[Message, int | None]] = set()
    made: dict[tuple[int, str, int | None], Slot] = {}
    counts: Counter[tuple[int, str]] = Counter()
    axis, places = micro_axis(program), StagePlaces.of(program)
    for op, run in run_ops_of(program):
        read = reads[run.function]
        stage, number = read.function.stage, run.micro_batch
        on = "" if number is None else f" on micro-batch {number}"
        what = f"stage function @{run.function}{on}"
        for key in read.receives:
            if (key, number) not in sent:
                sender = " and ".join(
                    f"@{name}" for name, each in reads.items() if key in each.sends
                )
                early = f"reads message {_named(key)} before it is computed"
                yield f"{what} {early}; run its sender {sender} earlier.", op
        for name, slot in read.takes.items():
            where = number if slot.kind == "kept" else None
            giver = made.get((stage, name, where))
            is_there = giver is not None and _is_given(giver, slot, read)
            if slot.kind in TOTALS:
                is_there = counts[stage, name] == (axis.size if axis else 1)
            if not is_there:
                form = "no earlier run returns it with this type, in this memory (device or host)"
                yield f"{what} reads {slot.kind} '{name}', but {form}.", op
        if number is not None or run.at == places.source(stage, None):
            sent.update((key, number) for key in read.sends)
        for name, slot in read.gives.items():
            made[stage, name, number if slot.kind == "kept" else None] = slot
            counts[stage, name] += 1


def _is_given(giver: Slot, slot: Slot, read: _Read) -> bool:
    """True if `giver`, a result of an earlier run, has the type that argument `slot` expects. A
    function that runs per micro-batch may read its shard of a `whole` value. A value that was left
    on the host must be copied back."""
    type_, axis = tensor_type_of(slot.value), micro_axis(read.function)
    sharding = read.function.sharding_of_slot(slot)
    seat = sharding.seat_of(axis.name) if axis and slot.kind == "whole" else None
    if seat is not None and not read.function.is_once:
        dim, placement = seat
        shape = list(shape_of(slot.value))
        shape[dim] *= placement.size
        type_ = with_shape(type_, shape)
    is_there = is_on_host(giver.value) == is_copied_back(slot.value)
    return is_there and giver.value.type == type_
