"""Where the ops of a parsed program stand in its text, for messages that point at them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.ir import Operation, SSAValue

_WIDTH = 140
"""Characters of a line that are shown; one with shardings has several hundred."""


@dataclass(frozen=True)
class SourceText:
    """A text that was parsed. offsets: of the ops that were made of it."""

    text: str
    name: str
    offsets: Mapping[Operation, int]

    def offset_of(self, place: Operation | SSAValue) -> int | None:
        """Where an op begins, or an argument is declared; None for what is not of this text."""
        owner = place.owner if isinstance(place, SSAValue) else place
        if isinstance(owner, Operation):
            return self.offsets.get(owner)
        assert isinstance(place, SSAValue)
        if place.name_hint is None:
            return None
        found = re.search(rf"%{re.escape(place.name_hint)}\s*:", self.text)
        return None if found is None else found.start()


def position(text: str, offset: int) -> tuple[int, int]:
    """Line and column of an offset, both from 1."""
    before = text[:offset]
    return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1


def excerpt(text: str, offset: int) -> str:
    """The line of an offset with its number, and a caret below; of a long line what is near."""
    line, column = position(text, offset)
    start = offset - column + 1
    end = text.find("\n", start)
    shown = text[start : len(text) if end < 0 else end].replace("\t", " ")
    at = column - 1
    if len(shown) > _WIDTH:
        cut = max(min(at - _WIDTH // 2, len(shown) - _WIDTH), 0)
        head, tail = "... " if cut else "", " ..." if cut + _WIDTH < len(shown) else ""
        shown = head + shown[cut : cut + _WIDTH] + tail
        at += len(head) - cut
    number = f"{line:5}"
    return f"{number} | {shown}\n{' ' * len(number)} | {' ' * at}^"
