"""The drawing docs/schedules.svg: a panel for each schedule, a row for each rank, to one scale.

python docs/schedules.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardweave.planners.lowering.stages.picture import moments_of
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.planners.schedules.table import Table

FILE = Path(__file__).with_suffix(".svg")
NUM_RANKS, NUM_MICRO_BATCHES = 4, 8

COLOURS = {
    "F": "#4c78a8", "f": "#9ecae9", "B": "#f58518", "b": "#ffbf79",
    "I": "#e45756", "i": "#ff9d98", "W": "#54a24b", "w": "#88d27a",
}  # fmt: skip
"""Of passes as `moments_of` names them; those of a rank's second stage are lighter."""

LEGEND = {
    "F": "forward", "B": "backward", "I": "to the input", "W": "to the weights",
    "f": "lighter: the second stage of a rank",
}  # fmt: skip

_MOMENT, _ROW, _LEFT, _TITLE = 18.0, 16, 60, 22
"""Pixels of a moment of a rank with one stage, of a row, of the ranks' names, and of a title."""


def drawing() -> str:
    """The SVG of all schedules that are named."""
    schedules = ((name, find_schedule(name)) for name in PIPELINE_SCHEDULES)
    return drawing_of(
        {
            name: (one.table(NUM_RANKS, NUM_MICRO_BATCHES, one.chunks), NUM_RANKS * one.chunks)
            for name, one in schedules
        }
    )


def drawing_of(schedules: Mapping[str, tuple[Table, int]]) -> str:
    """An SVG of tables by name, each with its number of stages.

    Stages of a rank that has several are shorter by as much, so that all tables do the same work.
    """
    lines: list[str] = []
    width, top = 0.0, 0
    for name, (table, stages) in schedules.items():
        moment = _MOMENT * len(table) / stages
        rows = moments_of(table, stages)
        lines.append(_text(0, top + 15, name, 13, 'font-weight="600"'))
        for rank, row in enumerate(rows):
            y = top + _TITLE + rank * _ROW
            lines.append(_text(0, y + 12, f"rank {rank}", 11))
            lines += ['<g font-size="9" text-anchor="middle">', *_cells(row, y, moment), "</g>"]
        width = max(width, _LEFT + moment * max(map(len, rows)))
        top += _TITLE + _ROW * len(rows) + 10
    x = 0
    for kind, what in LEGEND.items():
        lines.append(f'<path class="{kind}" d="M{x} {top}h12v12h-12z"/>')
        lines.append(_text(x + 17, top + 10, what, 11))
        x += 40 + 7 * len(what)
    size = f'viewBox="-8 -4 {max(width, x) + 16:g} {top + 24}"'
    font = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""
    back = '<rect x="-8" y="-4" width="100%" height="100%" fill="#ffffff"/>'
    names = ", ".join(schedules)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>'
    fills = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
    style = f"<style>text{{fill:#1e293b}}{fills}</style>"
    return "\n".join(
        [head, style, f"<title>Pipeline schedules: {names}</title>", back, *lines, "</svg>\n"]
    )


def _cells(row: Sequence[str], y: int, moment: float) -> Iterator[str]:
    """A box for each pass, with the number of its micro-batch."""
    for at, cell in enumerate(row):
        if cell in (".", "-"):
            continue
        length = moment * (2 if row[at + 1 : at + 2] == ["-"] else 1)
        x = _LEFT + at * moment
        yield f'<path class="{cell[0]}" d="M{x:g} {y}h{length - 1:g}v{_ROW - 2}h{1 - length:g}z"/>'
        yield f'<text x="{x + length / 2 - 0.5:g}" y="{y + 11}">{cell[1:]}</text>'


def _text(x: float, y: int, words: str, size: int, more: str = "") -> str:
    style = f'font-size="{size}"' + (f" {more}" if more else "")
    return f'<text x="{x:g}" y="{y}" {style}>{words}</text>'


if __name__ == "__main__":
    FILE.write_text(drawing())
