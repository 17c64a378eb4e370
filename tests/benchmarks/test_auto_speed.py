"""benchmarks/auto_speed.py: its result is within the goals."""

from __future__ import annotations

import json
from pathlib import Path

from shardweave.benchmarks.auto_speed import CASES, GOALS_S
from shardweave.benchmarks.step_parts import POINT

ROOT = Path(__file__).resolve().parents[2]


def test_planning_takes_no_longer_than_its_goals() -> None:
    record = json.loads((ROOT / "benchmarks/results/auto_speed.json").read_text())
    assert {"Llama-3-8B on 8x8", "Llama-3-8B on 1,024", "GPT-3 on 1,024"} <= set(record)
    assert set(record) <= set(CASES)
    assert set(CASES) == set(GOALS_S)
    for name, row in record.items():
        assert row["plan_s"] <= GOALS_S[name], name
        assert row["peak_bytes"] <= 2**30, name


def test_parts_of_the_step_of_long_sequences_add_up_to_it() -> None:
    found = json.loads((ROOT / "benchmarks/results/step_parts.json").read_text())
    speed = json.loads((ROOT / "benchmarks/results/auto_speed.json").read_text())
    row = speed["Llama-3-405B on 16,384, context 16"]
    assert row["plan"] == str(POINT)
    step_s = found.pop("step")
    assert abs(step_s - row["step_s"]) < 1e-6
    assert abs(step_s - sum(found.values())) < 0.01 * step_s
