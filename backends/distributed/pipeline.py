"""Staged programs on torch.distributed: the functions that one rank runs, and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardweave.backends.distributed.joined_totals import JoinedTotals, joined_totals
from shardweave.backends.distributed.mail import Address, ExpectedMessage, Mail
from shardweave.backends.distributed.parts import Parts
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.emitted import JoinedRunner
from shardweave.backends.programs import Key
from shardweave.backends.stages import Cut, Place, Slots, StagedStep, last_reads, slots_of_runs
from shardweave.backends.step.backend import Compiler
from shardweave.backends.watch import position
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.shards import merge_blocks, take_blocks
from shardweave.ir.program.messages import coming_messages, places_that_talk
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import Run, StagePlaces, functions_of, runs_of


class StagedRunner(JoinedRunner):
    """Runs the functions of this rank's stages in a step, in the order of the schedule."""

    def __init__(self, program: Program, runtime: Runtime, compiler: Compiler | None) -> None:
        super().__init__(runtime, compiler)
        self.program = program
        self.places = StagePlaces.of(program)
        self.agree(str(program))
        self.runs = [run for run in runs_of(program) if run.at == runtime.place]
        self.functions = slots_of_runs(program, self.runs)
        self.loaded = {name: self.load(slots.function) for name, slots in self.functions.items()}
        self.last_reads = last_reads(self.runs, self.functions)
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
        functions = [slots.function for slots in self.functions.values()]
        self.joined = joined_totals(program, functions, runtime)
        runtime.prepare(program)

    @property
    def source(self) -> str:
        return "\n\n".join(f"# {name}\n{each.source}" for name, each in self.loaded.items())

    def results_of(self, given: dict[Key, Tensor]) -> dict[Key, Tensor]:
        mail = Mail(self.runtime.rank, self.inbox, self.runtime.device, self.groups)
        mail.open()
        self._parts.pad(given)
        step = RankStep(self, given, mail)
        for run, last in zip(self.runs, self.last_reads, strict=True):
            step.run(run, self.functions[run.function], last)
        mail.close()
        returned = step.returned
        self._parts.unpad(returned)
        for key, dtype in self.elsewhere.items():
            returned[key] = torch.empty(0, dtype=dtype, device=self.runtime.device)
        return returned


def homes_of(program: Program) -> dict[str, int]:
    """Map each output that is no scalar to the stage coordinate whose run returns it earliest."""
    homes: dict[str, int] = {}
    functions = functions_of(program)
    for run in runs_of(program):
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
    for run in runs_of(program):
        function = functions[run.function]
        for slot in (*function.arguments, *function.results):
            if (slot.kind, slot.name) in holders:
                holders[slot.kind, slot.name].add(run.at)
    return {key: tuple(sorted(places or {0})) for key, places in holders.items()}


def _inbox(program: Program, runtime: Runtime) -> dict[int, Sequence[ExpectedMessage]]:
    """Return, by sending rank, its messages to this rank in a step, in the order it sends them."""
    expected_by_rank: dict[int, Sequence[ExpectedMessage]] = {}
    for place, messages in coming_messages(program).get(runtime.place, {}).items():
        expected: list[ExpectedMessage] = []
        for message in messages:
            sent = message.message
            address = message.stage, sent.other, sent.name, message.run.micro_batch
            form = shape_of(sent.value), dtype_of_value(sent.value)
            expected.append(ExpectedMessage(address, *form, message.seen))
        expected_by_rank[runtime.rank_at(place)] = tuple(expected)
    return expected_by_rank


class RankStep(StagedStep[Tensor]):
    """A step of a staged program, as one rank runs it. It sends and receives the messages of the
    function that runs."""

    def __init__(self, runner: StagedRunner, given: Mapping[Key, Tensor], mail: Mail) -> None:
        super().__init__(given)
        self.runner = runner
        self.mail = mail
        self.returned: dict[Key, Tensor] = {}
        self._stage = 0
        self._run: Run | None = None

    def send(self, x: Tensor, to: int, name: str) -> None:
        assert self._run is not None
        for place in self.runner.places.goals(self._run, self._stage, to):
            goal = self.runner.runtime.rank_at(place)
            self.mail.send(x, goal, (self._stage, to, name, self._run.micro_batch))

    def recv(self, source: int, name: str) -> Tensor:
        assert self._run is not None
        place = self.runner.places.source(source, self._run.micro_batch)
        address: Address = source, self._stage, name, self._run.micro_batch
        return self.mail.receive(self.runner.runtime.rank_at(place), address)

    def run(self, run: Run, slots: Slots, last: frozenset[Place]) -> None:
        joined = self.runner.joined.get(run.function)
        if joined is not None:
            self._join(slots.stage, joined)
        super().run(run, slots, last)

    def results_of(
        self, slots: Slots, run: Run, arguments: dict[Key, Tensor]
    ) -> Mapping[Key, Tensor]:
        runtime = self.runner.runtime
        self._stage, self._run, runtime.messages = slots.stage, run, self
        position.at_micro_batch(run.micro_batch)
        results = self.runner.loaded[run.function](runtime, arguments)
        runtime.messages = None
        return results

    def give(self, slots: Slots, slot: Slot, value: Tensor) -> None:
        self.returned[slot.kind, slot.name] = value

    def scalar(self, number: int, dtype: torch.dtype) -> Tensor:
        return torch.full((), number, dtype=dtype, device=self.runner.runtime.device)

    def taken(self, value: Tensor, cut: Cut, number: int) -> Tensor:
        return take_blocks(value, *cut, number)

    def merged(self, parts: list[Tensor], cut: Cut) -> Tensor:
        dim, _, block = cut
        return merge_blocks(parts, dim, block)

    def combined(self, place: Place, total: Tensor, term: Tensor, *, is_max: bool) -> Tensor:
        if is_max:
            return torch.maximum(total, term)
        if place in self.owned:
            return total.add_(term)
        self.owned.add(place)  # the first may share its memory with what others still read
        return total + term

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
