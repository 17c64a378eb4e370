"""Pages stay short: words of a page, words of a paragraph, and sentences that are too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE = 1000
"""Words of a page, code and tables included, that is not named below."""
LIMITS = {"README": 900}
ALL = 30_200
PARAGRAPH, SENTENCE, SHARE = 90, 35, 0.02


def prose_of(page: Path) -> list[str]:
    """The paragraphs of a page, without code and tables; each point of a list is one."""
    text = re.sub(r"^```.*?^```", "\n\n", page.read_text(), flags=re.M | re.S)
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    parts = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", "\n".join(lines))
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences_of(page: Path) -> list[str]:
    return [
        sentence
        for paragraph in prose_of(page)
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", paragraph)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_no_more_words_than_its_limit(page: Path) -> None:
    assert len(page.read_text().split()) <= LIMITS.get(page.stem, GUIDE)


def test_limits_are_of_pages_that_exist() -> None:
    assert set(LIMITS) <= {page.stem for page in PAGES}


def test_all_pages_have_no_more_words_than_their_limit() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= ALL


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_paragraph_is_too_long(page: Path) -> None:
    lengths = {text[:60]: len(text.split()) for text in prose_of(page)}
    assert {text: words for text, words in lengths.items() if words > PARAGRAPH} == {}


def test_few_sentences_are_too_long() -> None:
    sentences = [text for page in PAGES for text in sentences_of(page)]
    long = [text for text in sentences if len(text.split()) > SENTENCE]
    assert len(long) <= SHARE * len(sentences)


def test_paragraphs_and_sentences_are_read_off_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\nFirst one. Second\none.\n\n- a\n- b\n\n```sh\nx y\n```\n\n| a |\n")
    assert prose_of(page) == ["# A", "First one. Second one.", "- a", "- b"]
    assert sentences_of(page) == ["# A", "First one.", "Second one.", "- a", "- b"]
