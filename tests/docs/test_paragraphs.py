"""The tables of papers' paragraphs point at files and tests that exist, and give reasons."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from shardweave.docs.papers import PARAGRAPHS, STATES

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"^[\w/-]+\.(?:py|md|csv|json)(?:::\w+)?$")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.mark.parametrize("path", sorted(PARAGRAPHS.glob("*.tsv")), ids=lambda path: path.stem)
def test_what_a_row_names_exists(path: Path) -> None:
    rows = rows_of(path)
    named = [word for row in rows for word in re.findall(r"`([^`]+)`", row["here"])]
    paths = [word.partition("::") for word in named if "/" in word and PATH.match(word)]
    assert len(paths) > 20
    for name, _, test in paths:
        assert (ROOT / name).is_file(), name
        assert not test or f"def {test}(" in (ROOT / name).read_text(), f"{name}::{test}"


@pytest.mark.parametrize("path", sorted(PARAGRAPHS.glob("*.tsv")), ids=lambda path: path.stem)
def test_every_row_says_where_it_is_or_why_it_is_not(path: Path) -> None:
    for row in rows_of(path):
        assert row["state"] in STATES, row
        assert row["state"] == "background" or row["here"], row
