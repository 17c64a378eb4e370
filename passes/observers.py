"""Observers of a running pipeline: they time passes, print changes and programs, write files."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import TextIO

from xdsl.passes import ModulePass

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts

_NOTES = re.compile(r'\{(?:layer = "(?P<layer>[^"]*)")?(?:, )?(?:phase = (?P<phase>\w+))?')

_ARGUMENT = re.compile(r"(\(|, |-> \()(?=%|tensor<)")

CONTEXT = 1
"""Lines around each change."""


def changed_text(before: str, after: str) -> str:
    """Return a diff of two program texts; each hunk's header names its layer and phase.

    Each argument and each result of the function is a line of its own. Empty if nothing changed.
    Takes time linear in the texts for each hunk, since nearly all lines are distinct.
    """
    lines = list(unified_diff(_lines(before), _lines(after), lineterm="", n=CONTEXT))[2:]
    heads = [place for place, line in enumerate(lines) if line.startswith("@@")]
    for head, end in zip(heads, [*heads[1:], len(lines)], strict=False):
        changes = (line for line in lines[head + 1 : end] if not line.startswith(" "))
        lines[head] = f"@@ {_where(changes)} @@"
    return "".join(line + "\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Split a program's text into lines, with a line for each argument and result, too."""
    lines: list[str] = []
    for line in text.splitlines():
        is_head = line.lstrip().startswith("func.func ")
        lines += _ARGUMENT.sub(r"\1\n      ", line).split("\n") if is_head else [line]
    return lines


def _where(lines: Iterable[str]) -> str:
    for line in lines:
        match = _NOTES.search(line)
        if match is not None and match["phase"]:
            return f"layer '{match['layer'] or ''}', {match['phase']}"
    return "arguments and results"


class Observer:
    """Base of objects called before and after each pass; override the methods needed."""

    def before(self, pass_: ModulePass, program: Program) -> None:
        """Called with the program that the pass is about to change."""

    def after(self, pass_: ModulePass, program: Program) -> None:
        """Called with the verified result of the pass."""

    def failed(self, pass_: ModulePass, error: Exception) -> None:
        """Called before the error of a pass is raised; it may add a note to it."""


class Observers(Observer):
    """Several observers as one: the last one's `before` is called last, and its `after` first."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def before(self, pass_: ModulePass, program: Program) -> None:
        for observer in self._observers:
            observer.before(pass_, program)

    def after(self, pass_: ModulePass, program: Program) -> None:
        for observer in reversed(self._observers):
            observer.after(pass_, program)

    def failed(self, pass_: ModulePass, error: Exception) -> None:
        for observer in self._observers:
            observer.failed(pass_, error)


@dataclass(frozen=True)
class PassRecord:
    """Measurements of one pass. num_ops: ops in the program before and after the pass."""

    spec: str
    seconds: float
    num_ops: tuple[int, int]
    changed: bool


@dataclass
class PassWatch(Observer):
    """Measures each pass, with its verification: time, ops, whether it changed anything."""

    seen: list[PassRecord] = field(default_factory=list[PassRecord])
    _before: Program | None = None
    _num_ops: int = 0
    _start_s: float = 0.0

    def before(self, pass_: ModulePass, program: Program) -> None:
        self._before = program.clone()
        self._num_ops = num_ops(program)
        self._start_s = time.perf_counter()

    def after(self, pass_: ModulePass, program: Program) -> None:
        seconds = time.perf_counter() - self._start_s
        counts = self._num_ops, num_ops(program)
        changed = program != self._before
        self.seen.append(PassRecord(str(pass_.spec()), seconds, counts, changed))

    def table(self) -> str:
        """Return a table: for each pass seconds, share, ops before and after, and its name."""
        total_s = sum(entry.seconds for entry in self.seen)
        lines = [f"{'seconds':>9} {'share':>6} {'ops':>8} {'change':>7}  pass"]
        for entry in self.seen:
            before, after = entry.num_ops
            change = f"{after - before:+d}" if after != before else "0" if entry.changed else "-"
            share = entry.seconds / total_s if total_s else 0.0
            lines.append(f"{entry.seconds:9.3f} {share:6.0%} {after:8d} {change:>7}  {entry.spec}")
        return "\n".join([*lines, f"{total_s:9.3f} {'100%':>6}  in all"])


@dataclass
class PrintChanges(Observer):
    """Prints the lines that each pass changed in the program. Use a new object for each run."""

    out: TextIO = field(default_factory=lambda: sys.stderr)
    _before: str = ""

    def before(self, pass_: ModulePass, program: Program) -> None:
        # What the last pass left is printed already, which takes longer than most passes.
        self._before = self._before or str(program)

    def after(self, pass_: ModulePass, program: Program) -> None:
        before, self._before = self._before, str(program)
        changes = changed_text(before, self._before)
        if changes:
            print(f"// after {pass_.spec()}\n{changes}", end="", file=self.out)


@dataclass
class PrintPrograms(Observer):
    """Prints the program before passes in `names_before`, and after passes in `names_after`."""

    names_before: Collection[str] = ()
    names_after: Collection[str] = ()
    out: TextIO = field(default_factory=lambda: sys.stderr)

    def before(self, pass_: ModulePass, program: Program) -> None:
        if pass_.name in self.names_before:
            print(f"// before {pass_.spec()}\n{program}", end="", file=self.out)

    def after(self, pass_: ModulePass, program: Program) -> None:
        if pass_.name in self.names_after:
            print(f"// after {pass_.spec()}\n{program}", end="", file=self.out)


class DumpFiles(Observer):
    """Writes the program as `000-input.mlir`, `001-<pass>.mlir`, ... into a folder.

    The folder is made if it is not there. Files of an earlier dump are removed first, so that all
    numbered files belong to one run.

    Raises ValueError if the folder cannot be made.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(
                f"'{folder}' is a file, but a folder is needed in which to write the program "
                "after each pass; give another path."
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        # Without its first file a folder is no dump, and nothing in it is ours to remove.
        if (self._folder / "000-input.mlir").exists():
            for path in self._folder.glob("[0-9][0-9][0-9]-*.mlir"):
                path.unlink()
        self._count = 0

    def before(self, pass_: ModulePass, program: Program) -> None:
        if self._count == 0:
            program.save(self._folder / "000-input.mlir")

    def after(self, pass_: ModulePass, program: Program) -> None:
        self._count += 1
        program.save(self._path(self._count, pass_.name))

    def failed(self, pass_: ModulePass, error: Exception) -> None:
        files = sorted(self._folder.glob(f"{self._count:03d}-*.mlir"))
        error.add_note(f"the program before pass '{pass_.name}' is in {files[0]}")

    def _path(self, number: int, name: str) -> Path:
        return self._folder / f"{number:03d}-{re.sub(r'[^A-Za-z0-9-]+', '-', name)}.mlir"


class NameDump(Observer):
    """Adds to a failing pass's error how to dump the program before it; writes no file."""

    def failed(self, pass_: ModulePass, error: Exception) -> None:
        error.add_note(f"run with --dump-dir FOLDER to keep the program before pass '{pass_.name}'")


def num_ops(program: Program) -> int:
    return sum(1 for _ in ops_of_parts(program))
