"""A plugin of pytest that records the tests that reach given lines of a copy of the package.

`mark_lines` inserts a call of `hit`, with the line's number as its mark, before statements of the
copy. The plugin then writes to the folder that the environment variable `FOLDER` names: each pair
of a test and a mark that it reaches, itself or in a process that it started, and each test's
duration.
"""

from __future__ import annotations

import ast
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = "SHARDWEAVE_REACHED"
STALE_S = 0.2
"""Seconds for which a process that a test started relies on the name of the test that it read."""

_own = [""]
_parents: list[tuple[str, float]] = [("", -STALE_S)]
_seen = set[tuple[int, str]]()


def _current() -> Path:
    """The file with the name of the running test."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    return Path(os.environ[FOLDER]) / f"current-{worker}"


def hit(mark: int) -> None:
    """Record that the running test reached a mark."""
    if FOLDER not in os.environ:
        return
    test = _own[0]
    if not test:
        if time.monotonic() - _parents[0][1] > STALE_S:
            path = _current()
            _parents[0] = (path.read_text() if path.exists() else "", time.monotonic())
        test = _parents[0][0]
    if (mark, test) not in _seen:
        _seen.add((mark, test))
        with (Path(os.environ[FOLDER]) / f"reached-{os.getpid()}").open("a") as file:
            file.write(f"{mark}\t{test}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _own[0] = nodeid
    _current().write_text(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with (Path(os.environ[FOLDER]) / "durations").open("a") as file:
            file.write(f"{report.nodeid}\t{report.duration}\t{report.outcome}\n")


def mark_lines(root: Path, lines: Sequence[tuple[str, int]]) -> None:
    """Insert a call of `hit` before the statement around each line (path, line) in a function.

    The mark is the index in `lines`.
    """
    marks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for mark, (path, line) in enumerate(lines):
        marks[path].append((line, mark))
    for path, places in marks.items():
        source = (root / path).read_text()
        text, tree = source.splitlines(), ast.parse(source)
        starts = [(_start_of_statement(tree, line), mark) for line, mark in places]
        for start, mark in sorted(starts, reverse=True):
            if start:
                indent = text[start - 1][: -len(text[start - 1].lstrip())]
                call = f"__import__({__name__!r}, fromlist=['hit']).hit({mark})"
                text.insert(start - 1, indent + call)
        (root / path).write_text("\n".join(text) + "\n")


def _start_of_statement(node: ast.AST, line: int, in_function: bool = False) -> int:
    """The first line of the innermost statement around a line; 0 outside functions."""
    start = 0
    for child in ast.iter_child_nodes(node):
        decorators = [one.lineno for one in getattr(child, "decorator_list", ())]
        first = min([getattr(child, "lineno", line), *decorators])
        if not first <= line <= getattr(child, "end_lineno", line):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If)
        is_elif = is_elif and getattr(child, "col_offset", 0) == getattr(node, "col_offset", 0)
        if in_function and isinstance(child, ast.stmt) and not is_elif:
            start = first
        inside = in_function or isinstance(child, ast.FunctionDef)
        start = _start_of_statement(child, line, inside) or start
    return start
