"""The benchmark of slips runs, and the page on proofs quotes its result as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardweave.benchmarks.proof_mutants import (
    SETTINGS,
    Answer,
    Setting,
    counted,
    planted,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "proof_mutants.json"


def test_counts_tell_wrong_programs_from_harmless_ones() -> None:
    answers = [
        Answer("a", "k", 0, "wrong", "refused", True),
        Answer("a", "k", 1, "fails", "proved", False),
        Answer("b", "k", 0, "right", "refused", True),
        Answer("b", "k", 1, "right", "crashed", False),
    ]
    (counts, total) = counted(answers, "kind")
    assert (counts.planted, counts.wrong, counts.refused, counts.named) == (4, 2, 1, 1)
    assert (counts.right, counts.right_refused, counts.crashed, counts.false_proofs) == (2, 1, 1, 1)
    assert total.planted == 4
    assert [answer.is_false for answer in answers] == [False, True, False, True]


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[2]], ids=lambda one: one.name)
def test_slips_that_make_a_program_wrong_are_refused_by_name(setting: Setting) -> None:
    answers = planted(setting, 7, 10)
    wrong = [answer for answer in answers if answer.is_wrong]
    assert len(wrong) == 10
    assert [answer for answer in answers if answer.is_false] == []
    assert sum(answer.is_named for answer in wrong) >= 9


def test_no_wrong_program_of_the_result_is_proved() -> None:
    report = json.loads(RESULTS.read_text())
    total = report["kinds"][-1]
    assert report["false"] == []
    assert total["refused"] == total["wrong"] >= 1000
    assert total["named"] >= 0.9 * total["refused"]
    assert total["crashed"] == 0
