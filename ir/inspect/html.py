"""A program as HTML, for notebooks: its layers, folded, each with the lines of its ops."""

from __future__ import annotations

from html import escape

from shardweave.ir.inspect.diff_lines import Lines
from shardweave.ir.inspect.outline import Fold, fold, layers_of
from shardweave.ir.program import Program

MAX_LINES = 2000
"""Lines of ops in one page; a notebook is slow with more, and the folded layers say the rest."""

_STYLE = (
    "font-family:monospace;font-size:12px;white-space:pre;overflow-x:auto;margin:0 0 0 1.5em;"
    "padding:0"
)


def program_html(program: Program) -> str:
    """HTML without scripts or outside files; unopened, it is a line for each distinct layer."""
    lines = Lines(program)
    parts = [f"<div><b>{escape(repr(program)[1:-1])}</b>", _boundary(program)]
    left = MAX_LINES
    for one in fold(layers_of(program)):
        parts.append(_layer(one, lines, left))
        left -= len(one.first.members)
    return "".join([*parts, "</div>"])


def _layer(one: Fold, lines: Lines, left: int) -> str:
    counts = [f"{count} {phase}" for phase, count in one.first.ops.items()]
    said = ", ".join(filter(None, [*counts, one.first.moves]))
    shown = [escape(lines.line(op)) for op in one.first.members[: max(left, 0)]]
    hidden = len(one.first.members) - len(shown)
    if hidden:
        shown.append(f"... and {hidden} more ops; str(program) has all of them")
    return (
        f"<details><summary><b>{escape(one.name)}</b>: {escape(said)}</summary>"
        f'<pre style="{_STYLE}">' + "\n".join(shown) + "</pre></details>"
    )


def _boundary(program: Program) -> str:
    rows = [
        escape(f"{slot.kind:8} {slot.name or '-'} : {slot.value.type} {slot.sharding_attr or ''}")
        for slot in (*program.arguments, *program.results)
    ]
    count = f"{len(program.arguments)} arguments, {len(program.results)} results"
    return (
        f'<details><summary>{count}</summary><pre style="{_STYLE}">'
        + "\n".join(row.rstrip() for row in rows)
        + "</pre></details>"
    )
