"""The base class of runners of emitted source: checks that ranks agree, explains lost ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from functools import cache
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

    def load(self, program: Program, *, pending: Collection[str] = ()) -> tuple[str, StepFunction]:
        """Emit a program or stage function; return its source and a callable that runs it. pending:
        names of gradients that are added before they are reduced, as in `emit`."""
        kernels, runtime = self.compiler is not None, self.runtime
        fused = [op for op in program.ops if isinstance(op, FusedOp)] if kernels else []
        queue = PartsQueue(join_parts)
        agreed = runtime.agreed_on_stage
        if self.compiler == "inductor":
            calls = [CompiledRegion(op, runtime.device, agreed) for op in fused]
        else:
            calls = [FusedCall(op, runtime.device, agreed=agreed, queue=queue) for op in fused]
        self.kernels += calls
        in_parts = self.compiler == "triton"
        source = emit(program, kernels=kernels, in_parts=in_parts, pending=pending)
        functions = [*calls, queue.join]
        run = load_step(source, functions)
        position.register(run.__code__.co_filename, program, kernels=kernels)

        phases = " and ".join(dict.fromkeys(phase_of(op) for op in program.ops))

        @cache
        def in_ranges() -> StepFunction:
            step = load_step(source, functions, in_ranges=True)
            position.register(step.__code__.co_filename, program, kernels=kernels)
            return step

        def profiled(rt: Any, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
            if not is_profiling():
                return run(rt, given)
            with torch.profiler.record_function(f"shardweave: {phases}"):
                return in_ranges()(rt, given)

        return source, profiled

    def agree(self, text: str) -> None:
        """Raise AgreementError on every rank unless `text` is equal on all. A collective call."""
        self._number = int(digest_of(text.encode())[:15], 16)
        if self.runtime.mesh.num_devices > 1:
            require_same("the program", text, "give every rank the same one")

    def __call__(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        if self.runtime.mesh.num_devices == 1:
            return self.results_of(given)
        watchdog.begin(self._number)
        try:
            return self.results_of(given)
        except RuntimeError as error:
            watchdog.explain(error)
            raise

    @abstractmethod
    def results_of(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Run one step, as `Runner.__call__` does; the caller has to watch for lost ranks."""

    def explain(self) -> str:
        """Return a line for each fused region: its kernel, or ATen and the reason."""
        if not self.kernels:
            return "no fused regions: every op runs on ATen"
        lines = [kernel.explain(self.runtime.device) for kernel in self.kernels]
        return "\n".join(f"kernels[{number}]: {line}" for number, line in enumerate(lines))
