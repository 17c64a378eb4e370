"""Tables and sections of the pages that are made from `benchmarks/results`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_RESULTS = ROOT / "benchmarks" / "results"

Rows = Iterable[Iterable[str]]


def results(name: str) -> Any:
    """A file of `benchmarks/results`, by its name without `.json`."""
    return json.loads((_RESULTS / f"{name}.json").read_text())


def table(heads: str, rows: Rows) -> list[str]:
    """A table in Markdown; `heads` has its columns' names with `|` between."""
    names = heads.split(" | ")
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return [*lines, *(f"| {' | '.join(cells)} |" for cells in rows), ""]


def section(title: str, command: str, files: str, text: str, *tables: list[str]) -> list[str]:
    """A heading, what was measured, the command and files behind it, and its tables."""
    made = f"`python benchmarks/{command}`, `benchmarks/results/`: {files}."
    return [f"## {title}", "", f"{text} {made}", "", *(line for each in tables for line in each)]
