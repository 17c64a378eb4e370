"""A diff as one page of HTML, side by side, that needs no other file and runs no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

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

_STYLE = (Path(__file__).parent / "diff.css").read_text()


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
