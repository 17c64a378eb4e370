"""The benchmarks run, and the pages quote their results as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardweave.benchmarks.compile_time import PASSES, Run, Stage, combined, growth_of, measure
from shardweave.benchmarks.models import page
from shardweave.benchmarks.proofs import sentence

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


def test_pages_quote_the_results_of_compile_time() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("docs/measured.md", "README.md"))
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    for run in results["runs"]:
        assert row_of(run) in page
    growth = results["growth"]["passes"]
    assert f"by {growth['seconds_per_layer'] * 1e3:.0f} ms a layer" in page
    assert growth["worst_error"] < 0.2, "the page says that the passes grow linearly"
    assert results["machine"].split(", Python")[0] in page
    deepest = results["runs"][-1]
    capture_s = {stage["name"]: stage["seconds"] for stage in deepest["stages"]}["capture"]
    said = f"96 layers are captured in {capture_s:.1f} s, and lowered for 1,024 ranks in {{}} s."
    assert said.format(f"{deepest['passes_s']:.1f}") in " ".join(readme.split())


def test_page_quotes_the_time_to_capture_llama() -> None:
    path = RESULTS.with_name("compile_time_llama.json")
    run = json.loads(path.read_text())["runs"][-1]
    capture_s = {stage["name"]: stage["seconds"] for stage in run["stages"]}["capture"]
    said = f"The 32 layers of Llama-3-8B, of `transformers`, are captured in {capture_s:.1f} s"
    assert said in (ROOT / "docs" / "measured.md").read_text()


def test_page_quotes_the_time_to_cut_96_layers_into_stages_which_is_less_than_a_minute() -> None:
    results = json.loads(RESULTS.with_name("compile_time_staged.json").read_text())
    run = results["runs"][-1]
    mesh, took_s = results["mesh"], sum(stage["seconds"] for stage in run["stages"])
    assert (run["layers"], mesh) == (96, "stage=8,tensor=8,data=16")
    assert took_s <= 60.0
    assert run["text_bytes"] < 20e6
    said = (
        f"Cut into stages on `{mesh}`, with 64 micro-batches, the 96 layers take {took_s:.0f} s from the "
        "import of torch to a program that is scheduled, verified and simulated; its text has "
        f"{run['text_bytes'] / 1e6:.1f} MB"
    )
    assert said in " ".join((ROOT / "docs" / "measured.md").read_text().split())


def test_readme_repeats_the_table_of_measured_steps() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("docs/measured.md", "README.md"))
    table = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    rows = {row[0].strip(): row for row in table if len(row) == 6}
    for line in readme.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] in rows:
            wanted = [rows[cells[0]][column].strip() for column in (0, 2, 5)]
            assert [cells[0], *cells[2:]] == [one.split(" (")[0] for one in wanted]


def test_page_on_models_shows_the_results_of_the_benchmark_and_none_is_wrong() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())["rows"]
    results = [row["result"] for row in rows]
    assert page(rows) in (ROOT / "docs" / "models.md").read_text()
    assert set(results) <= {"exact", "refused"}
    assert results.count("exact") >= 0.95 * len(results)


def test_page_on_proofs_says_how_many_programs_are_proved_and_none_is_refused() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "proofs.json").read_text())
    assert sentence(data) in (ROOT / "docs" / "proof.md").read_text()
    assert "refused" not in {row["outcome"] for row in data["rows"]}


def row_of(run: dict[str, Any]) -> str:
    """One line of the table in the README."""
    stages = {stage["name"]: stage for stage in run["stages"]}
    text_s = stages["print"]["seconds"] + stages["parse"]["seconds"]
    cells = [
        f"{run['layers']}",
        f"{run['parameters'] / 1e9:.1f}e9",
        f"{run['local_ops']:,}",
        f"{stages['capture']['seconds']:.1f} s",
        f"{run['passes_s']:.1f} s",
        f"{text_s:.1f} s",
        f"{stages['parse']['peak_gib']:.2f} GiB",
    ]
    return f"| {' | '.join(cells)} |"
