"""The bases of passes that change a step in place, and analyses that several passes read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of

_Result = TypeVar("_Result")


class Analyses:
    """Analyses of one program, each computed at first use; passes that change it call `forget`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[Callable[[Program], Any], Any] = {}

    def of(self, analysis: Callable[[Program], _Result]) -> _Result:
        """The result of an analysis of the program as it is now."""
        if analysis not in self._known:
            self._known[analysis] = analysis(self.program)
        return cast("_Result", self._known[analysis])

    def forget(self) -> None:
        """Drop all results, since the program has changed."""
        self._known.clear()


class PassOnProgram(ModulePass):
    """Base of passes that change a Program in place; `run` gets one function at a time."""

    @abstractmethod
    def run(self, program: Program) -> None: ...

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for part in parts_of(Program(op)):
            self.run(part)


class PassWithAnalyses(PassOnProgram):
    """Base of passes that read analyses of a program; the passes of a pipeline share them."""

    @abstractmethod
    def rewrite(self, program: Program, analyses: Analyses) -> None:
        """Change the program in place; call `analyses.forget` if anything has changed."""

    def run(self, program: Program) -> None:
        self.rewrite(program, Analyses(program))
