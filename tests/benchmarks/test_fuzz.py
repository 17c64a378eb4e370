"""A few mutations of each kind of input; `benchmarks/fuzz.py` runs a thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardweave.benchmarks.fuzz import ROOT, outcomes
from shardweave.benchmarks.fuzz_cases import (
    BY_HAND,
    MODELS,
    Kind,
    captured,
    local_text,
    planned,
    use_plan,
    use_program,
    warm_up,
)
from shardweave.benchmarks.fuzz_entries import KINDS
from shardweave.tests.mutations import mutated_data, restructured

COUNTS = {
    "program": 6, "plan": 6, "cluster": 30, "checkpoint": 20, "mesh": 20, "pipeline": 10,
    "model": 6, "flags": 12, "point": 3,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # a damaged checkpoint that is skipped is named
@pytest.mark.parametrize("name", KINDS)
def test_mutations_are_accepted_or_refused_and_nothing_else(name: str) -> None:
    warm_up(name)
    results = list(outcomes(name, 7, range(COUNTS[name])))
    assert [one for one in results if one.kind == "found"] == []
    assert {one.kind for one in results} <= {"accepted", "refused"}
    assert len(results) == COUNTS[name]


def test_what_is_not_changed_is_accepted(tmp_path: Path) -> None:
    use_program(str(captured(MODELS[0])), tmp_path)
    use_program(local_text(MODELS[0]), tmp_path)
    for text in (BY_HAND, planned(MODELS[0]).to_json()):
        use_plan(text, tmp_path)


def crash(text: str, folder: Path) -> None:
    raise KeyError(text)


def touch(text: str, folder: Path) -> None:
    (ROOT / "made by a fuzzer").write_text(text)


def refuse(text: str, folder: Path) -> None:
    raise ValueError("no")


def refuse_from_below(text: str, folder: Path) -> None:
    int("no number")


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        (crash, "found", "KeyError at test_fuzz.py"),
        (touch, "found", "FileTouchedError at test_fuzz.py"),
        (refuse, "refused", "ValueError at test_fuzz.py"),
        (refuse_from_below, "found", "ValueError at test_fuzz.py"),
    ],
)
def test_finding_is_any_error_but_a_refusal(
    use: object, kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "own", Kind(lambda rng, folder: "text", use))  # pyright: ignore[reportArgumentType]
    [outcome] = outcomes("own", 0, [0])
    assert outcome.kind == kind
    assert text in outcome.text


def test_mutations_of_data_and_structure_change_what_they_are_given() -> None:
    rng = random.Random(0)
    data = {"a": [1, 2, {"b": "text"}], "c": 1.5}
    assert sum(mutated_data(data, rng) != data for _ in range(50)) > 25
    assert data == {"a": [1, 2, {"b": "text"}], "c": 1.5}
    text = "one 1\ntwo 2\nthree 3\n"
    assert sum(restructured(text, rng) != text for _ in range(50)) > 25
