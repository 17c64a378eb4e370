"""A diff as one page of HTML, side by side, that needs no other file and runs no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from shardweave.driver.report.diff.diff_text import (
    Number,
    detail_lines,
    group_title,
    headline,
    number_cells,
    where,
)
from shardweave.ir.inspect.diff import Change, ChangeGroup, StructuralDiff

OPEN_GROUPS = 8
"""How many groups are unfolded when the page is opened."""

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #1f2328; background: #fff; }
h1 { font-size: 1.3em; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
table.numbers { width: auto; table-layout: auto; margin: 1em 0; }
table.numbers td, table.numbers th { padding: 2px 12px; text-align: right; }
table.numbers td:first-child, table.numbers th:first-child { text-align: left; }
table.numbers tr.same { color: #888; }
td.line { font: 12px/1.5 ui-monospace, monospace; padding: 2px 8px; vertical-align: top;
  overflow-wrap: anywhere; width: 50%; white-space: pre-wrap; }
tr.where td { font-weight: 600; background: #f3f4f6; padding: 2px 8px; }
tr.added td.after { background: #d8f5dd; }
tr.removed td.before { background: #ffdfdc; }
tr.moved td.line { background: #ddeaff; }
tr.changed td.line { background: #fff5cc; }
tr.details td { font: 12px/1.5 ui-monospace, monospace; padding: 0 8px 4px 2em; color: #6a4b00; }
details { margin: 0.6em 0; border: 1px solid #d0d7de; border-radius: 6px; }
summary { cursor: pointer; padding: 4px 10px; font-weight: 600; }
"""


def page(diff: StructuralDiff, numbers: list[Number], names: tuple[str, str]) -> str:
    """The page. names: how to call the two programs."""
    title = escape(f"{names[0]} and {names[1]}")
    groups = "\n".join(
        _group(group, is_open=index < OPEN_GROUPS) for index, group in enumerate(diff.groups())
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>{escape(headline(diff))}</p>\n{_numbers(numbers, names)}\n{groups}\n</body>\n</html>\n"
    )


def _numbers(numbers: list[Number], names: tuple[str, str]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("", *names, "change"))
    rows = [f"<tr>{heads}</tr>"]
    for number in numbers:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in number_cells(number))
        kind = "same" if number.before == number.after else "differs"
        rows.append(f'<tr class="{kind}">{cells}</tr>')
    return '<table class="numbers">\n' + "\n".join(rows) + "\n</table>"


def _group(group: ChangeGroup, *, is_open: bool) -> str:
    rows: list[str] = []
    for title, changes in groupby(group.changes, key=where):
        rows.append(f'<tr class="where"><td colspan="2">{escape(title)}</td></tr>')
        for change in changes:
            rows += _rows(change)
    body = "\n".join(rows)
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(group_title(group))}</summary>\n"
        f"<table>\n{body}\n</table></details>"
    )


def _rows(change: Change) -> Iterator[str]:
    """The lines of both programs in one row, and what changed in the next."""
    is_bare = not change.before and not change.after
    sides = (change.op, change.op) if is_bare else (change.before, change.after)
    cells = "".join(
        f'<td class="line {side}">{escape(text)}</td>'
        for side, text in zip(("before", "after"), sides, strict=True)
    )
    yield f'<tr class="{change.kind}">{cells}</tr>'
    details = "<br>".join(map(escape, detail_lines(change)))
    if details:
        yield f'<tr class="details"><td colspan="2">{details}</td></tr>'
