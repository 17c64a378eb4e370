"""The 7B case of docs/planning.md: its commands print the lines that the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardweave.driver.cli import main
from shardweave.tests.pages import blocks_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"


@pytest.mark.slow
def test_case_of_7b_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    section = text[text.index("## A 7B Llama") : text.index("## Saying what you want")]
    commands, *shown = [block.text for block in blocks_of(section)][:3]
    monkeypatch.chdir(tmp_path)
    for line in commands.strip().splitlines():
        assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    for line in "".join(shown).splitlines():
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert re.search(f"^{pattern}", said, re.M), line
