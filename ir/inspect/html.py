"""A program as HTML, for notebooks: its layers, folded, each with the lines of its ops."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardweave.ir.inspect.diff_table import Lines
from shardweave.ir.inspect.outline import Fold, fold, layers_of
from shardweave.ir.program.program import Program

MAX_LINES = 2000
"""Lines of ops in one page; a notebook is slow with more, and the folded layers say the rest."""

_STYLE = (
    "font-family:monospace;font-size:12px;white-space:pre;overflow-x:auto;margin:0 0 0 1.5em;"
    "padding:0"
)


def program_html(program: Program) -> str:
    """Return the program as HTML without scripts or external files: one closed section per fold."""
    lines = Lines(program)
    parts = [f"<div><b>{escape(repr(program)[1:-1])}</b>", _boundary(program)]
    left = MAX_LINES
    for group in fold(layers_of(program)):
        parts.append(_layer(group, lines, max(left, 0)))
        left -= len(group.first.members)
    return "".join([*parts, "</div>"])


def _layer(group: Fold, lines: Lines, left: int) -> str:
    layer = group.first
    counts = [f"{count} {phase}" for phase, count in layer.ops.items()]
    summary = ", ".join(filter(None, [*counts, layer.moves]))
    shown = [lines.line(op) for op in layer.members[:left]]
    hidden = len(layer.members) - len(shown)
    if hidden:
        shown.append(f"... and {hidden} more ops; str(program) has all of them")
    return _details(f"<b>{escape(group.name)}</b>: {escape(summary)}", shown)


def _boundary(program: Program) -> str:
    rows = [
        f"{slot.kind:8} {slot.name or '-'} : {slot.value.type} {slot.sharding_attr or ''}".rstrip()
        for slot in (*program.arguments, *program.results)
    ]
    return _details(f"{len(program.arguments)} arguments, {len(program.results)} results", rows)


def _details(summary: str, lines: Sequence[str]) -> str:
    """Return a closed `<details>` section. summary: HTML. lines: plain text."""
    text = escape("\n".join(lines))
    return f'<details><summary>{summary}</summary><pre style="{_STYLE}">{text}</pre></details>'
