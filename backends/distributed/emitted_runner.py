"""Runs a program on this rank by its emitted Python module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from shardweave.backends.distributed.cuda_graph import GraphedStep
from shardweave.backends.distributed.parts import Parts
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.emitted import JoinedRunner
from shardweave.backends.programs import Key
from shardweave.backends.step.backend import Compiler
from shardweave.ir.program.program import Program


class EmittedRunner(JoinedRunner):
    """Runs a program by its emitted Python module. source: text of the module."""

    def __init__(
        self,
        program: Program,
        runtime: Runtime,
        *,
        compiler: Compiler | None,
        cuda_graph: bool,
        pending: Collection[str] = (),
    ) -> None:
        super().__init__(runtime, compiler)
        self._emitted = self.load(program, pending=pending)
        self.source = self._emitted.source
        self.agree(self.source)
        self._graphed = GraphedStep(self._emitted) if cuda_graph else None
        self._parts = Parts(program, runtime.coordinates)
        runtime.prepare(program)

    @property
    def order(self) -> Sequence[Key]:
        return () if self._graphed else self._emitted.order

    def results_of(self, given: dict[Key, Tensor]) -> dict[Key, Tensor]:
        self._parts.pad(given)
        if self._graphed is None:
            results = self._emitted(self.runtime, given)
        else:  # it writes gradients to its own memory
            given = {key: tensor for key, tensor in given.items() if key[0] != "grad"}
            results = self._graphed(self.runtime, given)
        self._parts.unpad(results)
        return results

    def put_results_of(
        self, given: dict[Key, Tensor], results: dict[Key, Tensor]
    ) -> Iterator[None]:
        if self._graphed is not None:
            yield from super().put_results_of(given, results)
            return
        self._parts.pad(given)
        for _ in self._emitted.in_order(self.runtime, given, results):
            self._parts.unpad(results)
            yield
