"""benchmarks/auto_depth.py: its rows on a small deep model, and its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardweave.benchmarks import auto_depth

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_line_through_few_blocks_is_held_to_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = "gpt:layers=10,hidden=32,heads=4,vocab=64,seq=8,batch=8"
    monkeypatch.setattr(auto_depth, "MODELS", {"small": (spec, "perlmutter:nodes=1")})
    monkeypatch.setattr(auto_depth, "QUICK", "small")
    out = tmp_path / "rows.json"
    assert auto_depth.main(["--quick", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert len(rows) == len(auto_depth.points(4))
    for row in rows:
        assert row["time_error"] == pytest.approx(row["few_s"] / row["whole_s"] - 1)
        assert abs(row["time_error"]) < 0.1


def test_result_has_all_models_and_the_line_is_near() -> None:
    rows = json.loads((ROOT / "benchmarks/results/auto_depth.json").read_text())
    assert {row["model"] for row in rows} == set(auto_depth.MODELS)
    assert max(abs(row["time_error"]) for row in rows) < 0.1
    assert max(abs(row["memory_error"]) for row in rows) < 0.001
