"""Staged programs on torch.distributed: the functions that one rank runs, and values it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardweave.backends.distributed.joined_totals import JoinedTotals, joined_totals
from shardweave.backends.distributed.mail import Address, ExpectedMessage, Mail
from shardweave.backends.distributed.parts import Parts
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.emit import StepFunction
from shardweave.backends.emit.emitted import JoinedRunner
from shardweave.backends.programs import Key, sharding_held
from shardweave.backends.step.backend import Compiler
from shardweave.backends.watch import position
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import block_of
from shardweave.ir.mesh.shards import merge_blocks, take_blocks
from shardweave.ir.program.messages import coming_messages, places_that_talk
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import (
    HELD,
    Run,
    StageFunction,
    StagePlaces,
    functions_of,
    micro_axis,
    runs_of,
)
from shardweave.ir.program.storage import is_unshared

Place = tuple[int, str, int | None]
"""Key of a held value: its stage, name and micro-batch (None: of all micro-batches)."""

Cut = tuple[int, int, int]
"""Split of a value into micro-batches: the dim, the number of micro-batches, the block length."""


@dataclass(frozen=True)
class _Loaded:
    """A function of a stage of this rank, ready to run.

    cuts: by slot, the split into micro-batches. maxima: names of values that are combined by
    maximum. unshared: names of sums that are in memory of their own.
    """

    stage: int
    run: StepFunction
    arguments: tuple[Slot, ...]
    results: tuple[Slot, ...]
    cuts: Mapping[Key, tuple[Cut, ...]]
    maxima: frozenset[str]
    unshared: frozenset[str]

    @cached_property
    def given(self) -> tuple[Key, ...]:
        """Keys of the arguments of the step that the function gets unchanged."""
        return tuple(
            (slot.kind, slot.name)
            for slot in self.arguments
            if slot.kind in _OF_STEP and (slot.kind, slot.name) not in self.cuts
        )

    @cached_property
    def made(self) -> tuple[Slot, ...]:
        """Slots of the other arguments, except those kept for one micro-batch."""
        given = {*self.given, *(("kept", name) for name in self.kept)}
        return tuple(slot for slot in self.arguments if (slot.kind, slot.name) not in given)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.arguments if slot.kind == "kept")

    @cached_property
    def adding(self) -> tuple[Key, ...]:
        """Keys of results that the function can add in place to an earlier total."""
        return tuple(
            (slot.kind, slot.name)
            for slot in self.results
            if slot.kind == "grad" or (slot.kind == "sum" and slot.name not in self.maxima)
        )


_OF_STEP = ("param", "buffer", "tangent", "input")
"""Kinds of slots that are arguments of the whole step."""


class StagedRunner(JoinedRunner):
    """Runs the functions of this rank's stages in a step, in the order of the schedule.

    sources: source of the Python module of each function, by name.
    """

    def __init__(self, program: Program, runtime: Runtime, compiler: Compiler | None) -> None:
        super().__init__(runtime, compiler)
        self.program = program
        self.sources: dict[str, str] = {}
        functions = functions_of(program)
        self.places = StagePlaces.of(program)
        self.agree(str(program))
        self.runs = [run for _, run in runs_of(program) if run.at == runtime.place]
        self.functions = {
            name: self._loaded(functions[name])
            for name in dict.fromkeys(run.function for run in self.runs)
        }
        self.last_reads = _last_reads(self.runs, self.functions)
        self.homes = homes_of(program)
        self.elsewhere = {
            (slot.kind, slot.name): dtype_of_value(slot.value)
            for slot in program.results
            if slot.kind == "output"
            and slot.name in self.homes
            and self.homes[slot.name] != runtime.place
        }
        self.groups = runtime.message_groups(places_that_talk(program))
        self.inbox = _inbox(program, runtime)
        self._parts = Parts(program, runtime.coordinates)
        self.joined = joined_totals(program, [functions[name] for name in self.functions], runtime)
        runtime.prepare(program)

    @property
    def source(self) -> str:
        return "\n\n".join(f"# {name}\n{text}" for name, text in self.sources.items())

    def _loaded(self, function: StageFunction) -> _Loaded:
        self.sources[function.name], run = self.load(function)
        axis = micro_axis(function)
        cuts: dict[Key, tuple[Cut, ...]] = {}
        maxima: set[str] = set()
        for slot in (*function.arguments, *function.results):
            sharding = sharding_held(function, slot)
            if sharding.reduction == "max":
                maxima.add(slot.name)
            seat = sharding.seat_of(axis.name) if axis is not None else None
            if seat is not None:
                dim, placement = seat
                cuts[slot.kind, slot.name] = (
                    (dim, placement.size, block_of(sharding.dims[dim], placement)),
                )
        sums = [slot for slot in function.results if slot.kind == "sum"]
        return _Loaded(
            function.stage,
            run,
            tuple(function.arguments),
            tuple(function.results),
            cuts,
            frozenset(maxima),
            frozenset(slot.name for slot in sums if is_unshared(slot.value)),
        )

    def results_of(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        mail = Mail(self.runtime.rank, self.inbox, self.runtime.device, self.groups)
        mail.open()
        step = StagedStep(self, self._parts.padded(given), mail)
        for run, last_reads in zip(self.runs, self.last_reads, strict=True):
            step.run(run, last_reads)
        mail.close()
        returned = self._parts.held(step.returned)
        for key, dtype in self.elsewhere.items():
            returned[key] = torch.empty(0, dtype=dtype, device=self.runtime.device)
        return returned


def _place_of(slot: Slot, stage: int, micro_batch: int | None) -> Place:
    """Return the key under which a function's argument or result is held until it is read."""
    return stage, slot.name, micro_batch if slot.kind == "kept" else None


def _last_reads(
    runs: Sequence[Run], functions: Mapping[str, _Loaded]
) -> Sequence[frozenset[Place]]:
    """Return for each run the held values that it reads and no later run does."""
    read: set[Place] = set()
    reads: list[frozenset[Place]] = []
    for run in reversed(runs):
        loaded = functions[run.function]
        taken = {
            _place_of(slot, loaded.stage, run.micro_batch)
            for slot in loaded.arguments
            if slot.kind in HELD
        }
        reads.append(frozenset(taken - read))
        read |= taken
    return reads[::-1]


def homes_of(program: Program) -> dict[str, int]:
    """Map each output with dims that only one coordinate on the stage axis has to that
    coordinate."""
    homes: dict[str, int] = {}
    functions = functions_of(program)
    for _, run in runs_of(program):
        for slot in functions[run.function].results:
            if slot.kind == "output" and shape_of(slot.value):
                homes.setdefault(slot.name, run.at)
    return homes


def holders_of(program: Program) -> dict[Key, tuple[int, ...]]:
    """Map each parameter and buffer (kind, name) to the coordinates on the stage axis that read or
    write it. An unused parameter or buffer is at coordinate 0."""
    holders: dict[Key, set[int]] = {
        (slot.kind, slot.name): set()
        for slot in program.arguments
        if slot.kind in ("param", "buffer")
    }
    functions = functions_of(program)
    for _, run in runs_of(program):
        function = functions[run.function]
        for slot in (*function.arguments, *function.results):
            if (slot.kind, slot.name) in holders:
                holders[slot.kind, slot.name].add(run.at)
    return {key: tuple(sorted(places or {0})) for key, places in holders.items()}


def _inbox(program: Program, runtime: Runtime) -> dict[int, Sequence[ExpectedMessage]]:
    """Return, by sending rank, its messages to this rank in a step, in the order it sends them."""
    expected_by_rank: dict[int, Sequence[ExpectedMessage]] = {}
    for place, messages in coming_messages(program, runtime.place).items():
        expected: list[ExpectedMessage] = []
        for message in messages:
            address = message.stage, message.op.to, message.op.message, message.run.micro_batch
            value = message.op.operands[0]
            form = shape_of(value), dtype_of_value(value)
            expected.append(ExpectedMessage(address, *form, message.seen))
        expected_by_rank[runtime.rank_at(place)] = tuple(expected)
    return expected_by_rank


@dataclass(frozen=True)
class _MicroBatchMail:
    """Sends and receives the messages of one run of a function."""

    mail: Mail
    runner: StagedRunner
    stage: int
    run: Run

    def send(self, x: Tensor, to: int, name: str) -> None:
        for place in self.runner.places.goals(self.run, self.stage, to):
            goal = self.runner.runtime.rank_at(place)
            self.mail.send(x, goal, (self.stage, to, name, self.run.micro_batch))

    def recv(self, source: int, name: str) -> Tensor:
        place = self.runner.places.source(source, self.run.micro_batch)
        address: Address = source, self.stage, name, self.run.micro_batch
        return self.mail.receive(self.runner.runtime.rank_at(place), address)


class StagedStep:
    """One step on one rank, with the values that its stages hold between runs.

    kept: values of one micro-batch, or of the whole step. totals: combined results of the
    micro-batches so far, or (for slots of kind `part`) a list with the result of each; owned: keys
    of totals in memory of their own, which may be added to in place.
    """

    def __init__(self, runner: StagedRunner, given: Mapping[Key, Tensor], mail: Mail) -> None:
        self.runner = runner
        self.given = given
        self.mail = mail
        self.kept: dict[Place, Tensor] = {}
        self.totals: dict[Place, list[Tensor]] = {}
        self.cuts: dict[Place, tuple[Cut, ...]] = {}
        self.owned: set[Place] = set()
        self.returned: dict[Key, Tensor] = {}

    def run(self, run: Run, last_reads: frozenset[Place]) -> None:
        loaded, runtime = self.runner.functions[run.function], self.runner.runtime
        joined = self.runner.joined.get(run.function)
        if joined is not None:
            self._join(loaded.stage, joined)
        arguments = self._arguments(loaded, run.micro_batch, last_reads)
        runtime.messages = _MicroBatchMail(self.mail, self.runner, loaded.stage, run)
        position.at_micro_batch(run.micro_batch)
        results = loaded.run(runtime, arguments)
        runtime.messages = None
        stage, number, kept = loaded.stage, run.micro_batch, self.kept
        for slot in loaded.results:
            kind, name = key = slot.kind, slot.name
            if kind == "kept":
                kept[stage, name, number] = results[key]
            elif kind in ("output", "grad", "buffer"):
                self.returned[key] = results[key]
            else:
                self._keep(slot, results[key], loaded)

    def _arguments(
        self, loaded: _Loaded, number: int | None, last_reads: frozenset[Place]
    ) -> dict[Key, Tensor]:
        """Return a function's arguments, with the buffers that it adds gradients and sums to. The
        function removes arguments from the dict, so that each is freed after its last use."""
        stage, kept, given = loaded.stage, self.kept, self.given
        arguments = {key: given[key] for key in loaded.given}
        for name in loaded.kept:
            place = stage, name, number
            arguments["kept", name] = kept.pop(place) if place in last_reads else kept[place]
        for slot in loaded.made:
            arguments[slot.kind, slot.name] = self._argument(slot, loaded, number, last_reads)
        for key in loaded.adding:
            place = stage, key[1], None
            if key[0] == "grad" and key in given:
                arguments[key] = given[key]
            elif key[0] == "sum" and place in self.owned:
                arguments[key] = self.totals[place][0]
        return arguments

    def _argument(
        self, slot: Slot, loaded: _Loaded, number: int | None, last_reads: frozenset[Place]
    ) -> Tensor:
        if slot.kind in _OF_STEP:
            return self._part(slot, self.given[slot.kind, slot.name], loaded, number)
        if slot.kind == "micro_batch":
            dtype = dtype_of_value(slot.value)
            return torch.full((), number or 0, dtype=dtype, device=self.runner.runtime.device)
        place = loaded.stage, slot.name, None
        is_last = place in last_reads
        if slot.kind == "whole":
            tensor = self.kept.pop(place) if is_last else self.kept[place]
            return self._part(slot, tensor, loaded, number)
        parts = self.totals.pop(place) if is_last else self.totals[place]
        for dim, _, block in self.cuts.get(place, ()):
            parts = [merge_blocks(parts, dim, block)]
        return parts[0]

    def _part(self, slot: Slot, tensor: Tensor, loaded: _Loaded, number: int | None) -> Tensor:
        """Return the slice of a whole batch's value that micro-batch `number` reads."""
        if number is not None:
            for dim, size, block in loaded.cuts.get((slot.kind, slot.name), ()):
                tensor = take_blocks(tensor, dim, size, block, number)
        return tensor

    def _join(self, stage: int, joined: JoinedTotals) -> None:
        """Combine a stage's totals over its coordinates. Collective among them."""
        by_reduction: dict[str, list[Tensor]] = {}
        for name, reduction in joined.sums.items():
            place = stage, name, None
            total = self.totals[place][0]
            if place not in self.owned or not total.is_contiguous():
                total = total.clone(memory_format=torch.contiguous_format)
                self.totals[place] = [total]
                self.owned.add(place)
            by_reduction.setdefault(reduction, []).append(total)
        for reduction, totals in by_reduction.items():
            joined.reduce(totals, reduction)
        for name in joined.parts:
            self.totals[stage, name, None] = joined.gathered(self.totals[stage, name, None])

    def _keep(self, slot: Slot, tensor: Tensor, loaded: _Loaded) -> None:
        """Hold a result of a function, or combine it with that of earlier micro-batches."""
        place = loaded.stage, slot.name, None
        if slot.kind == "whole":
            self.kept[place] = tensor
        elif slot.kind == "part":
            self.totals.setdefault(place, []).append(tensor)
            self.cuts[place] = loaded.cuts[slot.kind, slot.name]
        elif slot.kind == "sum" and place in self.totals:
            self._add(place, tensor, is_max=slot.name in loaded.maxima)
        else:
            self.totals[place] = [tensor]
            if slot.name in loaded.unshared:
                self.owned.add(place)

    def _add(self, place: Place, tensor: Tensor, *, is_max: bool) -> None:
        total = self.totals[place][0]
        if total is tensor:  # the function has added to it
            return
        if is_max:
            self.totals[place] = [torch.maximum(total, tensor)]
        elif place in self.owned:
            total.add_(tensor)
        else:  # the first may share its memory with what others still read
            self.totals[place] = [total + tensor]
            self.owned.add(place)
