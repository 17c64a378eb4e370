"""Output of the commands: plain lines, and a spinner on standard error for long work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.table import Table


def plain_table(words: Sequence[str], numbers: Sequence[str], last: Sequence[str] = ()) -> Table:
    """Make a table without lines: columns of words, right-aligned numbers, and words again."""
    table = Table(*words, box=None, pad_edge=False)
    for column in numbers:
        table.add_column(column, justify="right")
    for column in last:
        table.add_column(column)
    return table


def status(text: str, *, quiet: bool = False) -> AbstractContextManager[Any]:
    """Show `text` with a spinner on standard error while the work lasts; nothing off a terminal."""
    return Console(stderr=True, quiet=quiet).status(f"{text} ...")


def flops_text(count: float) -> str:
    """Format a number of FLOPs: `1.5 GFLOP` of 1.5e9."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PFLOP"
