"""The bases of passes that change a step in place."""

from __future__ import annotations

from abc import abstractmethod

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.passes.analyses import Analyses


class PassOnProgram(ModulePass):
    """A pass over a Program: `run` changes it in place, function by function if it is staged."""

    @abstractmethod
    def run(self, program: Program) -> None: ...

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for part in parts_of(Program(op)):
            self.run(part)


class PassWithAnalyses(PassOnProgram):
    """A pass that reads analyses of a program, which a pipeline shares between such passes."""

    @abstractmethod
    def rewrite(self, program: Program, analyses: Analyses) -> None:
        """Change the program in place, and call `analyses.forget` if anything has changed."""

    def run(self, program: Program) -> None:
        self.rewrite(program, Analyses(program))
