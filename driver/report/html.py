"""Parts of a page: its style, without outside files; sections, tables, and tiles of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from shardweave.planners.cost.memory import PARTS
from shardweave.planners.simulate.timeline import PHASE_COLOURS

_PART_COLOURS = dict(
    zip(
        PARTS,
        ("#4c78a8", "#9d755d", "#e45756", "#bab0ac", "#72b7b2", "#f2a541", "#b279a2", "#54a24b"),
        strict=True,
    )
)
_DEVICE_COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e4a5a0", "#9d755d", "#c7b042",
)  # fmt: skip


def _colours() -> str:
    rules = [
        f"rect.{name}, polygon.{name} {{ fill: {colour}; }} "
        f".legend i.{name} {{ background: {colour}; }}"
        for name, colour in {**PHASE_COLOURS, **_PART_COLOURS}.items()
    ]
    phases = " ".join(f"--{phase}: {colour};" for phase, colour in PHASE_COLOURS.items())
    rules.append(f":root {{ {phases} }}")
    rules += [f"rect.c{number} {{ fill: {c}; }}" for number, c in enumerate(_DEVICE_COLOURS)]
    return "\n".join(rules)


STYLE = f"{(Path(__file__).parent / 'report.css').read_text()}{_colours()}\n"


def document(title: str, body: str, *, more_style: str = "") -> str:
    """Make a page that needs no other file. more_style: CSS beside `STYLE`."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{more_style}</style></head><body>"
        f"{body}</body></html>\n"
    )


Cell = str | tuple[str]
"""Text, or (in a tuple) a number, which is right-aligned."""


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """Build a table that scrolls horizontally on narrow pages. Cells are text, not HTML."""

    def line(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{escape(cell[0])}</{tag}>'
            if isinstance(cell, tuple)
            else f"<{tag}>{escape(cell)}</{tag}>"
            for cell in cells
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line(head, "th")}</tr>{body}</table></div>'


def tiles(numbers: Mapping[str, str], *, fits: bool) -> str:
    """Build tiles of numbers, by label. fits: False adds a warning that memory is too small."""
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in numbers.items()
    )
    warning = "" if fits else '<p class="warn">This needs more memory than the device has.</p>'
    return f'<section><div class="tiles">{cells}</div>{warning}</section>'
