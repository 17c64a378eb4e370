"""Refusals: a note stands before each statement that raises, and those not reached are listed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardweave.benchmarks.refusals import noting, raises, unreached

SOURCE = """def half(x: int) -> int:
    if x < 0: raise ValueError("negative")
    if x % 2:
        raise ValueError(
            f"{x} is odd"
        )
    assert x != 4
    try:
        return x // 2
    except OverflowError as error:
        raise
"""
TEST = """import sys
sys.path.insert(0, "ir")
import pytest
from half import half


def test_odd() -> None:
    with pytest.raises(ValueError, match="1 is odd"):
        half(1)
"""


def test_notes_change_no_line_and_no_result(tmp_path: Path) -> None:
    noted = noting(SOURCE, "ir/half.py", tmp_path)
    assert len(noted.splitlines()) == len(SOURCE.splitlines())
    namespace: dict[str, object] = {}
    exec(noted, namespace)
    half = namespace["half"]
    assert callable(half)
    assert half(2) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="3 is odd"):
        half(3)
    assert [path.name for path in tmp_path.iterdir()] == ["ir+half.py:4"]
    assert [node.lineno for node in raises(SOURCE)] == [2, 4]


def test_refusal_that_no_test_reaches_is_listed(tmp_path: Path) -> None:
    for name, text in {"ir/half.py": SOURCE, "tests/test_half.py": TEST}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    missing, count, code = unreached(tmp_path, "ir", ["tests"])
    assert (missing, count, code) == (["ir/half.py:2: raise ValueError('negative')"], 2, 0)
    assert "half" not in sys.modules
