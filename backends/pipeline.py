"""Staged programs on torch.distributed: what one rank runs of a schedule, and what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.backends.backend import Runner
from shardweave.backends.emit import StepFunction, emit, load_step
from shardweave.backends.mail import Address, ComingMessage, Mail
from shardweave.backends.parts import Parts
from shardweave.backends.programs import Key, sharding_held
from shardweave.backends.runtime import Runtime
from shardweave.backends.triton.launch import FusedCall, explain_calls
from shardweave.ir import dist
from shardweave.ir.kernel import FusedOp
from shardweave.ir.placement import block_of
from shardweave.ir.program import Program, Slot
from shardweave.ir.sharding.shards import merge_blocks, take_blocks
from shardweave.ir.staged import Run, StageFunction, functions_of, micro_axis, places_of, runs_of
from shardweave.ir.types import dtype_of_value, shape_of

Cut = tuple[int, int, int]
"""A dim, into how many parts it is cut for micro-batches, and in blocks of which length."""


@dataclass(frozen=True)
class _Loaded:
    """A function of a stage of this rank, ready to run. cuts: of its inputs and parts, by slot."""

    stage: int
    run: StepFunction
    arguments: tuple[Slot, ...]
    results: tuple[Slot, ...]
    cuts: Mapping[Key, tuple[Cut, ...]]
    maxima: frozenset[str]


class StagedRunner(Runner):
    """Runs what the ranks of one coordinate on the stage axis run of a step.

    source: the modules of its functions. kernels: their fused regions, generated.
    """

    def __init__(self, program: Program, runtime: Runtime, *, kernels: bool) -> None:
        self.program = program
        self.runtime = runtime
        self.kernels: list[FusedCall] = []
        self.sources: dict[str, str] = {}
        functions = functions_of(program)
        self.places = places_of(program)
        self.runs = [run for _, run in runs_of(program) if run.at == runtime.place]
        self.functions = {
            name: self._load(functions[name], kernels=kernels)
            for name in dict.fromkeys(run.function for run in self.runs)
        }
        self.readers = Counter(
            (one.stage, slot.name)
            for one in self.functions.values()
            for slot in one.arguments
            if slot.kind == "kept"
        )
        self.inbox = _inbox(program, functions, runtime)
        self._parts = Parts(program, runtime.coordinates)
        runtime.prepare(program)

    @property
    def source(self) -> str:
        """The modules of this rank's functions, one behind the other."""
        return "\n\n".join(f"# {name}\n{text}" for name, text in self.sources.items())

    def _load(self, function: StageFunction, *, kernels: bool) -> _Loaded:
        fused = [op for op in function.ops if isinstance(op, FusedOp)] if kernels else []
        calls = [FusedCall(op) for op in fused]
        self.kernels += calls
        source = self.sources[function.name] = emit(function, kernels=kernels)
        axis = micro_axis(function)
        cuts: dict[Key, tuple[Cut, ...]] = {}
        maxima: set[str] = set()
        for slot in (*function.arguments, *function.results):
            sharding = sharding_held(function, slot)
            if sharding.reduction == "max":
                maxima.add(slot.name)
            found = sharding.seat_of(axis.name) if axis is not None else None
            if found is not None:
                dim, placement = found
                cuts[slot.kind, slot.name] = (
                    (dim, placement.size, block_of(sharding.dims[dim], placement)),
                )
        return _Loaded(
            function.stage,
            load_step(source, calls),
            tuple(function.arguments),
            tuple(function.results),
            cuts,
            frozenset(maxima),
        )

    def __call__(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        mail = Mail(self.runtime.rank, self.inbox, self.runtime.device)
        mail.open()
        step = _Step(self, self._parts.padded(given), mail)
        for run in self.runs:
            step.run(run)
        mail.close()
        for slot in self.program.results:
            # Another stage has it.
            if slot.kind == "output" and (slot.kind, slot.name) not in step.returned:
                empty = torch.empty(0, dtype=dtype_of_value(slot.value), device=self.runtime.device)
                step.returned[slot.kind, slot.name] = empty
        return self._parts.held(step.returned)

    def explain(self) -> str:
        """What runs each fused region: its kernel, or ATen and why. A line for each."""
        return explain_calls(self.kernels, self.runtime.device)


@dataclass(frozen=True)
class Home:
    """Where an output is: a coordinate on the stage axis. shape: of the whole output."""

    place: int
    shape: tuple[int, ...]


def homes_of(program: Program) -> dict[str, Home]:
    """By name of an output of one or more dims, where it is: no other stage has it."""
    found: dict[str, Home] = {}
    functions = functions_of(program)
    for _, run in runs_of(program):
        function = functions[run.function]
        for slot in function.results:
            if slot.kind == "output" and shape_of(slot.value):
                sharding = sharding_held(function, slot)
                found[slot.name] = Home(run.at, sharding.global_shape(shape_of(slot.value)))
    return found


def holders_of(program: Program) -> dict[Key, tuple[int, ...]]:
    """By kind and name of parameters and buffers, the coordinates on the stage axis that read them.

    What nobody reads is at the first one.
    """
    found: dict[Key, set[int]] = {
        (slot.kind, slot.name): set()
        for slot in program.arguments
        if slot.kind in ("param", "buffer")
    }
    functions = functions_of(program)
    for _, run in runs_of(program):
        for slot in functions[run.function].arguments:
            if (slot.kind, slot.name) in found:
                found[slot.kind, slot.name].add(run.at)
    return {key: tuple(sorted(places or {0})) for key, places in found.items()}


def _inbox(
    program: Program, functions: Mapping[str, StageFunction], runtime: Runtime
) -> dict[int, Sequence[ComingMessage]]:
    """By sending rank, what it sends to this one in a step, in its order."""
    places = places_of(program)
    sends = {
        name: [op for op in function.ops if isinstance(op, dist.SendOp)]
        for name, function in functions.items()
    }
    found: dict[int, list[ComingMessage]] = {}
    for _, run in runs_of(program):
        if run.at == runtime.place:
            continue
        stage = functions[run.function].stage
        for op in sends[run.function]:
            if places[op.to] == runtime.place:
                address = stage, op.to, op.message, run.micro_batch
                value = op.operands[0]
                expected = ComingMessage(address, shape_of(value), dtype_of_value(value))
                found.setdefault(runtime.rank_at(run.at), []).append(expected)
    return {rank: tuple(expected) for rank, expected in found.items()}


@dataclass(frozen=True)
class _MicroBatchMail:
    """The messages of one run."""

    mail: Mail
    runner: StagedRunner
    stage: int
    micro_batch: int | None

    def send(self, x: Tensor, to: int, name: str) -> None:
        goal = self.runner.runtime.rank_at(self.runner.places[to])
        self.mail.send(x, goal, (self.stage, to, name, self.micro_batch))

    def recv(self, source: int, name: str) -> Tensor:
        sender = self.runner.runtime.rank_at(self.runner.places[source])
        address: Address = source, self.stage, name, self.micro_batch
        return self.mail.receive(sender, address)


class _Step:
    """One step of one rank: what its stages hold between their runs.

    kept: by stage, name and micro-batch. totals: by stage and name what micro-batches gave; owned:
    those of them in memory of their own, to which more may be added in place.
    """

    def __init__(self, runner: StagedRunner, given: Mapping[Key, Tensor], mail: Mail) -> None:
        self.runner = runner
        self.given = given
        self.mail = mail
        self.kept: dict[tuple[int, str, int | None], Tensor] = {}
        self.left: Counter[tuple[int, str, int | None]] = Counter()
        self.totals: dict[tuple[int, str], list[Tensor]] = {}
        self.cuts: dict[tuple[int, str], tuple[Cut, ...]] = {}
        self.owned: set[tuple[int, str]] = set()
        self.returned: dict[Key, Tensor] = {}

    def run(self, run: Run) -> None:
        loaded, runtime = self.runner.functions[run.function], self.runner.runtime
        arguments = {
            (slot.kind, slot.name): self._argument(slot, loaded, run.micro_batch)
            for slot in loaded.arguments
        }
        arguments |= {
            key: self.given[key]
            for slot in loaded.results
            if slot.kind == "grad" and (key := (slot.kind, slot.name)) in self.given
        }
        runtime.messages = _MicroBatchMail(self.mail, self.runner, loaded.stage, run.micro_batch)
        results = loaded.run(runtime, arguments)
        runtime.messages = None
        for slot in loaded.results:
            key = slot.kind, slot.name
            if slot.kind in ("output", "grad", "buffer"):
                self.returned[key] = results[key]
            else:
                self._keep(slot, results[key], loaded, run.micro_batch)

    def _argument(self, slot: Slot, loaded: _Loaded, number: int | None) -> Tensor:
        if slot.kind in ("param", "buffer", "tangent", "input"):
            tensor = self.given[slot.kind, slot.name]
            if number is not None:
                for dim, size, block in loaded.cuts.get((slot.kind, slot.name), ()):
                    tensor = take_blocks(tensor, dim, size, block, number)
            return tensor
        if slot.kind == "micro_batch":
            dtype = dtype_of_value(slot.value)
            return torch.full((), number or 0, dtype=dtype, device=self.runner.runtime.device)
        if slot.kind in ("whole", "kept"):
            key = loaded.stage, slot.name, number if slot.kind == "kept" else None
            self.left[key] -= 1
            is_last = slot.kind == "kept" and not self.left[key]
            return self.kept.pop(key) if is_last else self.kept[key]
        parts = self.totals[loaded.stage, slot.name]
        for dim, _, block in self.cuts.get((loaded.stage, slot.name), ()):
            parts = [merge_blocks(parts, dim, block)]
        return parts[0]

    def _keep(self, slot: Slot, tensor: Tensor, loaded: _Loaded, number: int | None) -> None:
        if slot.kind in ("whole", "kept"):
            key = loaded.stage, slot.name, number if slot.kind == "kept" else None
            self.kept[key] = tensor
            self.left[key] = self.runner.readers[loaded.stage, slot.name]
            return
        place = loaded.stage, slot.name
        if slot.kind == "part":
            self.totals.setdefault(place, []).append(tensor)
            self.cuts[place] = loaded.cuts[slot.kind, slot.name]
        elif slot.kind == "sum" and place in self.totals:
            self._add(place, tensor, is_max=slot.name in loaded.maxima)
        else:
            self.totals[place] = [tensor]

    def _add(self, place: tuple[int, str], tensor: Tensor, *, is_max: bool) -> None:
        total = self.totals[place][0]
        if is_max:
            self.totals[place] = [torch.maximum(total, tensor)]
        elif place in self.owned:
            total.add_(tensor)
        else:  # the first may share its memory with what others still read
            self.totals[place] = [total + tensor]
            self.owned.add(place)
