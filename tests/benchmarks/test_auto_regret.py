"""benchmarks/auto_regret.py: its result, the page that quotes it, and what it calls tight."""

from __future__ import annotations

import json
from pathlib import Path

from shardweave.benchmarks.auto_regret import (
    PROBLEMS,
    Step,
    read_sweep,
    tight_memory,
    write_sweep,
)
from shardweave.planners.auto.space.point import JointPoint

ROOT = Path(__file__).resolve().parents[2]


def test_regret_of_the_result_is_below_two_percent() -> None:
    record = json.loads((ROOT / "benchmarks/results/auto_regret.json").read_text())
    assert set(record["problems"]) == set(PROBLEMS)
    rows = record["problems"].values()
    assert all(row["auto_s"] <= 1.02 * row["best_s"] for row in rows)


def test_tight_memory_holds_no_plan_without_recomputation() -> None:
    sweep = {
        JointPoint(): Step(1.0, 100.0),
        JointPoint(zero=3): Step(1.0, 80.0),
        JointPoint(recompute="layer"): Step(2.0, 40.0),
    }
    assert 40 <= tight_memory(sweep) < 80


def test_sweep_that_was_written_is_read(tmp_path: Path) -> None:
    sweep = {JointPoint(data=2, sequence_parallel=True): Step(0.5, 10.0)}
    write_sweep(tmp_path / "sweep.json", sweep)
    assert read_sweep(tmp_path / "sweep.json") == sweep
