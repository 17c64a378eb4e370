"""The base class of runners of emitted source: checks that ranks agree, explains lost ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.emit import StepFunction, emit, load_step
from shardweave.backends.inductor.compiled_region import CompiledRegion
from shardweave.backends.programs import Key
from shardweave.backends.step.backend import Compiler, Runner
from shardweave.backends.triton.launch.launch import FusedCall, join_parts
from shardweave.backends.triton.source.parts import PartsQueue
from shardweave.backends.watch import position, watchdog
from shardweave.backends.watch.agreement import digest_of, require_same
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import is_profiling
from shardweave.passes.messages.early_waits import wait_early


class Emitted:
    """A program, or stage function, as loaded Python source.

    kernels: functions of the fused regions; None: their ops run one by one. in_parts, pending: as
    in `emit`. While torch's profiler records, each layer is a range.
    """

    def __init__(
        self,
        program: Program,
        kernels: Sequence[Callable[..., Any]] | None,
        *,
        in_parts: bool,
        pending: Collection[str],
    ) -> None:
        self._program = program
        self._kernels = kernels
        self._in_parts = in_parts
        self._pending = pending
        self._range = f"shardweave: {' and '.join(dict.fromkeys(map(phase_of, program.ops)))}"
        self.source = self._emit(program)
        self._run = self._loaded(self.source, program)

    def _emit(self, program: Program, order: list[Key] | None = None) -> str:
        return emit(
            program,
            kernels=self._kernels is not None,
            in_parts=self._in_parts,
            pending=self._pending,
            order=order,
        )

    def _loaded(
        self, source: str, program: Program, *, in_ranges: bool = False
    ) -> Callable[..., Any]:
        run = load_step(source, self._kernels or (), in_ranges=in_ranges)
        has_kernels = self._kernels is not None
        position.register(run.__code__.co_filename, program, kernels=has_kernels)
        return run

    @cached_property
    def _run_in_ranges(self) -> StepFunction:
        return self._loaded(self.source, self._program, in_ranges=True)

    def __call__(self, rt: Any, given: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Run the program, as `StepFunction`."""
        if not is_profiling():
            return self._run(rt, given)
        with torch.profiler.record_function(self._range):
            return self._run_in_ranges(rt, given)

    @cached_property
    def _ordered(self) -> tuple[list[Key], str, Program]:
        program, order = self._program.clone(), list[Key]()
        wait_early(program)
        return order, self._emit(program, order), program

    @property
    def order(self) -> Sequence[Key]:
        """The gradients after which `in_order` yields, before the end of the program."""
        return self._ordered[0]

    @cached_property
    def _run_in_order(self) -> Callable[..., Iterator[None]]:
        return self._loaded(*self._ordered[1:])

    @cached_property
    def _run_in_order_and_ranges(self) -> Callable[..., Iterator[None]]:
        return self._loaded(*self._ordered[1:], in_ranges=True)

    def in_order(
        self, rt: Any, given: dict[Key, Tensor], results: dict[Key, Tensor]
    ) -> Iterator[None]:
        """Run the program, as `Runner.in_order`."""
        if not is_profiling():
            return (yield from self._run_in_order(rt, given, results))
        resumed = self._run_in_order_and_ranges(rt, given, results)
        while True:
            with torch.profiler.record_function(self._range):
                if next(resumed, self) is self:
                    return
            yield


class JoinedRunner(Runner):
    """Runs emitted source as one rank of a mesh.

    compiler: compiles fused regions; None runs their ops one by one. kernels: the compiled regions
    of all loaded programs.
    """

    def __init__(self, runtime: Runtime, compiler: Compiler | None = None) -> None:
        self.runtime = runtime
        self.compiler = compiler
        self.kernels: list[FusedCall | CompiledRegion] = []
        self._number = 0

    def load(self, program: Program, *, pending: Collection[str] = ()) -> Emitted:
        """Emit a program or stage function, and load its source. pending: names of gradients that
        are added before they are reduced, as in `emit`."""
        kernels, runtime = self.compiler is not None, self.runtime
        fused = [op for op in program.ops if isinstance(op, FusedOp)] if kernels else []
        queue = PartsQueue(join_parts)
        agreed = runtime.agreed_on_stage
        if self.compiler == "inductor":
            calls = [CompiledRegion(op, runtime.device, agreed) for op in fused]
        else:
            calls = [FusedCall(op, runtime.device, agreed=agreed, queue=queue) for op in fused]
        self.kernels += calls
        functions = [*calls, queue.join] if kernels else None
        return Emitted(program, functions, in_parts=self.compiler == "triton", pending=pending)

    def agree(self, text: str) -> None:
        """Raise AgreementError on every rank unless `text` is equal on all. A collective call."""
        self._number = int(digest_of(text.encode())[:15], 16)
        if self.runtime.mesh.num_devices > 1:
            require_same("the program", text, "give every rank the same program")

    def __call__(self, given: dict[Key, Tensor]) -> dict[Key, Tensor]:
        with self._watched():
            return self.results_of(given)

    def in_order(self, given: dict[Key, Tensor], results: dict[Key, Tensor]) -> Iterator[None]:
        with self._watched():
            yield from self.put_results_of(given, results)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Explain errors by lost ranks, if there are other ranks."""
        is_joint = self.runtime.mesh.num_devices > 1
        if is_joint:
            watchdog.begin(self._number)
        try:
            yield
        except RuntimeError as error:
            if is_joint:
                watchdog.explain(error)
            raise

    @abstractmethod
    def results_of(self, given: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Run one step, as `Runner.__call__` does; the caller has to watch for lost ranks."""

    def put_results_of(
        self, given: dict[Key, Tensor], results: dict[Key, Tensor]
    ) -> Iterator[None]:
        """Run one step, as `Runner.in_order` does; the caller has to watch for lost ranks."""
        results.update(self.results_of(given))
        yield

    def explain(self) -> str:
        """Return a line for each fused region: its kernel, or ATen and the reason."""
        if not self.kernels:
            return "no fused regions: every op runs on ATen"
        lines = [kernel.explain(self.runtime.device) for kernel in self.kernels]
        return "\n".join(f"kernels[{number}]: {line}" for number, line in enumerate(lines))
