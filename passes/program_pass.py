"""The base of passes that change a step in place."""

from __future__ import annotations

from abc import abstractmethod

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of


class PassOnProgram(ModulePass):
    """A pass over a Program: `run` is what it does, on each function of a staged one."""

    @abstractmethod
    def run(self, program: Program) -> None: ...

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for part in parts_of(Program(op)):
            self.run(part)
