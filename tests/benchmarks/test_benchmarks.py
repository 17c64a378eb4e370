"""The benchmarks run, and README quotes their results as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardweave.benchmarks.compile_time import PASSES, Run, Stage, combined, growth_of, measure
from shardweave.docs.figures import training

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "compile_time.json"
TINY = "gpt:layers={layers},hidden=16,heads=8,vocab=32,seq=8,batch=128"


def test_line_through_points_on_a_line_is_that_line() -> None:
    growth = growth_of([12, 24, 48], [1.7, 2.9, 5.3])
    assert growth.seconds_per_layer == pytest.approx(0.1)
    assert growth.seconds_at_zero == pytest.approx(0.5)
    assert growth.worst_error == pytest.approx(0.0, abs=1e-9)


def test_runs_are_combined_to_the_fastest_times_and_the_highest_peak() -> None:
    runs = [
        Run(2, stages=[Stage("capture", 3.0, 9.0, 0.4)]),
        Run(2, stages=[Stage("capture", 2.0, 9.5, 0.5)]),
    ]
    assert combined(runs).stages == [Stage("capture", 2.0, 9.0, 0.5)]


def test_compile_time_measures_every_stage_once() -> None:
    run = measure(2, TINY)
    names = [stage.name for stage in run.stages]
    assert names == ["import", "build", "capture", "plan", *PASSES, "print", "parse"]
    assert run.passes_s == sum(stage.seconds for stage in run.stages if stage.name in PASSES)
    assert run.captured_ops > 100
    assert run.local_ops > run.captured_ops


def test_readme_quotes_the_results_of_compile_time() -> None:
    readme = (ROOT / "README.md").read_text()
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    assert results["growth"]["passes"]["worst_error"] < 0.2, "the passes do not grow linearly"
    deepest = results["runs"][-1]
    capture_s = {stage["name"]: stage["seconds"] for stage in deepest["stages"]}["capture"]
    assert {f"{capture_s:.1f} s", f"{deepest['passes_s']:.1f} s"} <= seconds_of(readme)


def seconds_of(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d s\b", text))


def test_96_layers_are_cut_into_stages_in_less_than_a_minute() -> None:
    results = json.loads(RESULTS.with_name("compile_time_staged.json").read_text())
    run = results["runs"][-1]
    assert (run["layers"], results["mesh"]) == (96, "stage=8,tensor=8,data=16")
    assert sum(stage["seconds"] for stage in run["stages"]) <= 60.0
    assert run["text_bytes"] < 20e6


def test_readme_has_the_measured_steps() -> None:
    """Its last two columns are those of the case, which is the first cell's place in the list."""
    cases = ("data", "shards", "tensor", "tensor in sub-batches", "data x tensor", "one process")
    measured = {cells[0]: cells for cells in map(cells_of, reversed(training())) if cells}
    lines = [cells_of(line) for line in (ROOT / "README.md").read_text().splitlines()]
    rows = [cells for cells in lines if len(cells) == 4][2:]
    assert [cells[2:] for cells in rows] == [
        [measured[name][2], measured[name][5]] for name in cases
    ]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_no_model_is_wrong_and_readme_counts_them() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())["rows"]
    results = [row["result"] for row in rows]
    assert set(results) <= {"exact", "refused"}
    assert results.count("exact") >= 0.95 * len(results)
    numbers = set(re.findall(r"\d+", (ROOT / "README.md").read_text()))
    assert {str(len(rows)), *(str(results.count(kind)) for kind in set(results))} <= numbers


def test_no_program_that_is_made_is_refused_a_proof() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "proofs.json").read_text())
    assert "refused" not in {row["outcome"] for row in data["rows"]}
