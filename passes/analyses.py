"""Facts about a program that several passes read, such as the forward part of its propagation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from shardweave.ir.program.program import Program

_Result = TypeVar("_Result")


class Analyses:
    """The analyses of one program, each computed at first use; who changes it calls `forget`."""

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
