"""The observer of a pipeline: it is called before and after each pass, and when one fails."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.passes import ModulePass

from shardweave.ir.program import Program


class Observer:
    """Sees the program before and after each pass; subclass what is needed."""

    def before(self, one: ModulePass, program: Program) -> None:
        """Called with the program that the pass is about to change."""

    def after(self, one: ModulePass, program: Program) -> None:
        """Called with the verified result of the pass."""

    def failed(self, one: ModulePass, error: Exception, before: Callable[[], Program]) -> None:
        """Called before the error of a pass is raised; it may add a note to it.

        before: makes the program that the pass was given, by running the passes before it again.
        """
