"""What differs between two texts of a program, line by line, as a unified diff says it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile

_NOTES = re.compile(r'\{(?:layer = "(?P<layer>[^"]*)")?(?:, )?(?:phase = (?P<phase>\w+))?')

_ARGUMENT = re.compile(r"(\(|, |-> \()(?=%|tensor<)")

CONTEXT = 1
"""Lines around each change."""


def changed_text(before: str, after: str) -> str:
    """The changed lines with `-` and `+`, between context; a hunk's head names layer and phase.

    Each argument of the function, and each result, counts as a line. Empty if nothing changed.
    What both texts begin and end with costs nothing; the rest about its length times the number of
    hunks, as lines of a program are nearly all distinct.
    """
    old, new = _lines(before), _lines(after)
    start = _num_equal(old, new)
    end = min(_num_equal(old[::-1], new[::-1]), len(old) - start, len(new) - start)
    start, end = max(start - CONTEXT, 0), max(end - CONTEXT, 0)
    return "".join(
        line + "\n" for line in _hunks(old[start : len(old) - end], new[start : len(new) - end])
    )


def _num_equal(old: Sequence[str], new: Sequence[str]) -> int:
    """How many lines both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _hunks(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        if all(tag == "equal" for tag, *_ in group):
            continue
        changes = [(old[i1:i2], new[j1:j2]) for tag, i1, i2, j1, j2 in group if tag != "equal"]
        yield f"@@ {_where(line for pair in changes for lines in pair for line in lines)} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (f" {line}" for line in old[i1:i2])
                continue
            yield from (f"-{line}" for line in old[i1:i2])
            yield from (f"+{line}" for line in new[j1:j2])


def _lines(text: str) -> list[str]:
    """The lines of a program, with each argument and result of its function on one of its own."""
    found: list[str] = []
    for line in text.splitlines():
        is_head = line.lstrip().startswith("func.func ")
        found += _ARGUMENT.sub(r"\1\n      ", line).split("\n") if is_head else [line]
    return found


def _where(lines: Iterable[str]) -> str:
    """The layer and phase of the first line that has them."""
    for line in lines:
        match = _NOTES.search(line)
        if match is not None and match["phase"]:
            return f"layer '{match['layer'] or ''}', {match['phase']}"
    return "arguments and results"
