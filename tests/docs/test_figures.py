"""The pages of figures are made of the results: all of them, and each as a table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardweave.docs.figures import figures
from shardweave.docs.papers import papers

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"figures.md": figures, "papers.md": papers}


@pytest.mark.parametrize("name", PAGES)
def test_rows_have_as_many_cells_as_their_heads_and_none_is_missing(name: str) -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", PAGES[name](), re.M)
    assert len(blocks) > 8
    for block in blocks:
        head, _, *rows = block.splitlines()
        assert rows, head
        assert {row.count(" | ") for row in rows} == {head.count(" | ")}, head
        assert not re.search(r"\b(?:None|nan|inf)\b", block), head


def test_every_result_is_on_a_page_or_is_read_by_a_test() -> None:
    pages = "".join(write() for write in PAGES.values())
    pages += "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    kept = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert {name for name in kept if f"{name}." not in pages and name not in tests} == set()
