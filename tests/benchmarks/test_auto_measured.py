"""benchmarks/auto_measured.py: the neighbours it measures, and what it says of the choice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardweave.benchmarks import auto_measured
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import joint_space
from shardweave.planners.cost.presets import find_cluster

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "auto_measured.py"


def test_neighbours_differ_in_one_dimension_and_all_of_them_are_there() -> None:
    example = build_example("gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=2")
    reader = CostReader(
        Depths.of(capture(example.module, kwargs=example.kwargs)), find_cluster("testbed:nodes=2")
    )
    space = joint_space(reader, None, Constraints.parse("", ""))
    names = {str(one) for one in auto_measured.neighbours(JointPoint(data=2), space)}
    assert names == {
        "data=2,tensor=1, blocking",
        "data=2,tensor=1, cross-pass",
        "data=2,tensor=1, list",
        "data=2,tensor=1, zero 1, in-order",
        "data=2,tensor=1, zero 3, in-order",
        "data=2,tensor=1, recompute after-communication, in-order",
        "data=2,tensor=1, recompute layer, in-order",
        "data=1,tensor=2, in-order",
        "data=1,tensor=1,stages=2, in-order, 1f1b",
        "data=1,tensor=1,stages=2, in-order, gpipe",
        "data=1,tensor=1,stages=2, in-order, zero-bubble",
        "data=1,tensor=1,stages=2, in-order, zero-bubble-h2",
        "data=1,tensor=1,stages=2, in-order, list",
    }


def test_verdict_is_the_rank_by_medians() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "program": "1", "times_s": [1.02, 9.0, 0.5]},
        {"name": "b", "program": "2", "times_s": [1.0, 1.0, 7.0]},
    ]
    assert auto_measured.verdict(rows) == "the choice is 2 of 2 as measured, 2.0% above the fastest"


def test_plans_of_one_program_are_one_row() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "program": "1", "times_s": [1.2, 1.2, 1.2]},
        {"name": "b", "program": "2", "times_s": [1.1, 1.1, 1.1]},
        {"name": "c", "program": "1", "times_s": [1.0, 1.0, 1.0, 1.0]},
    ]
    assert auto_measured.verdict(rows) == "the choice is 1 of 2 as measured, 0.0% above the fastest"
    assert auto_measured.spread(rows) == "plans of one program differ by up to 20.0%"
    names = [row["name"] for row in auto_measured.programs_of(rows)]
    assert names == ["a (and 1 more of this program)", "b"]
    assert [row["name"] for row in rows] == ["a", "b", "c"]


@pytest.mark.slow
def test_quick_run_measures_the_choice_and_neighbours(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--cluster", "testbed:nodes=2"]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=900)
    (result,) = json.loads(out.read_text())["results"]
    assert len(result["rows"]) == 1 + auto_measured.FEW
    assert all(len(row["times_s"]) == 3 and row["simulated_s"] > 0 for row in result["rows"])
