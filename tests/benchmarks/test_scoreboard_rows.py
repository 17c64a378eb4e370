"""Rows of others: each is scored, or named with what is wrong and what to do; a cluster file is
enough for devices, frameworks and clusters that nobody has seen."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardweave.benchmarks import scoreboard_predict
from shardweave.benchmarks.runs import calibrate
from shardweave.benchmarks.runs.predict import PredictedRun, RunPredictor, placed
from shardweave.benchmarks.runs.rows import COLUMNS, NEEDED, note_on_columns, read_rows, read_runs
from shardweave.benchmarks.scoreboard import FOLDER, main
from shardweave.benchmarks.scoreboard_predict import cluster_of, predict_all
from shardweave.benchmarks.scoreboard_score import score_of
from shardweave.planners.cost.cluster_file import load_cluster
from shardweave.planners.cost.presets import find_cluster

CLUSTER = """
format: shardweave.cluster/1
name: elsewhere
devices:
  Zeta-1: {flops: {bfloat16: 200T, float32: 25T}, memory_bytes: 64GB, memory_bandwidth_bytes_s: 2TB/s}
  Zeta-2: {flops: {bfloat16: 400T, float32: 50T}, memory_bytes: 64GB, memory_bandwidth_bytes_s: 4TB/s}
nodes:
  - {device: Zeta-1, devices: 4, count: 2, bandwidth_bytes_s: 100GB/s, nic_bandwidth_bytes_s: 25GB/s}
  - {device: Zeta-2, devices: 4, count: 2, bandwidth_bytes_s: 100GB/s, nic_bandwidth_bytes_s: 25GB/s}
"""

ROW = {
    **{"gpu": "Zeta-1", "gpus": "2", "layers": "3", "hidden": "64", "heads": "4", "seq": "32"},
    **{"gbs": "8", "mbs": "2", "tp": "2", "ffn": "256", "vocab": "64", "precision": "bf16"},
    **{"framework": "OtherTrain", "step_ms": "2.5"},
}


def table(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Rows in the columns of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def scored(tmp_path: Path, runs: Path, *, code: int = 0) -> dict[str, Any]:
    """The record of the scoreboard on a cluster file, by part."""
    cluster, out = tmp_path / "elsewhere.yaml", tmp_path / "out.json"
    cluster.write_text(CLUSTER)
    assert main(["--runs", str(runs), "--cluster", str(cluster), "--json", str(out)]) == code
    return json.loads(out.read_text())


def parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [record[name] for name in ("looked", "held") if name in record]


def test_cluster_file_is_enough_for_runs_of_which_few_columns_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's name is their source; a column that nobody asks for is told."""
    rows = [{**ROW, "owner": "us"}, {**ROW, "owner": "us", "gpu": "Zeta-2", "step_ms": "1.5"}]
    (found,) = parts(scored(tmp_path, table(tmp_path / "theirs.csv", rows)))
    assert found["refused"] == 0
    assert found["sources"]["theirs"]["runs"] == 2
    assert math.isfinite(found["sources"]["theirs"]["error"])
    assert "columns that are not read: owner" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"gpu;gpus;layers\nA100;8;4\n",
            "is one column, 'gpu;gpus;layers'; separate columns by com",
        ),
        (b"\xff\xfe\x00g", r"r\.csv: it is no text in UTF-8; give runs as CSV"),
    ],
)
def test_file_that_is_no_csv_is_refused_with_its_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_runs([path])


def test_misspelt_column_is_told_with_what_it_may_mean(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("gpu,step_s,owner\n")
    note = note_on_columns(path)
    assert note.endswith("not read: step_s (did you mean 'step_ms'?), owner")
    path.write_text("gpu,step_ms\n")
    assert note_on_columns(path) == ""


def test_rows_take_the_nodes_of_their_kind_of_device(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.yaml"
    file.write_text(CLUSTER)
    cluster = find_cluster(str(file))
    runs = read_runs([table(tmp_path / "r.csv", [ROW, {**ROW, "gpu": "Zeta-2"}])])
    slow, fast = (RunPredictor().predict(run, placed(run, cluster)).step_s for run in runs)
    assert slow > fast
    wide = replace(runs[1], gpus=16)
    nodes = placed(wide, cluster).nodes
    assert [(one.device, one.devices, one.count) for one in nodes] == [("Zeta-2", 4, 4)]


@pytest.mark.parametrize(
    ("column", "cell", "advice"),
    [
        ("mbs", "0", "write a whole number of 1 or more"),
        ("gbs", "2.5", "write a whole number of 1 or more"),
        ("layers", "many", "write a whole number of 1 or more"),
        ("hidden", "", "write a whole number of 1 or more"),
        ("gpus", "1e400", "leave it empty where nothing is known"),
        ("step_ms", "nan", "leave it empty where nothing is known"),
        ("step_ms", "0", "write what was measured, or leave it empty"),
        ("mem_gib", "-3", "write what was measured, or leave it empty"),
        ("sp", "maybe", "write one of true, yes, 1, false, no, 0"),
        ("status", "lost", "write one of ok, oom, error"),
        ("recompute", "some", "write one of none, full, selective"),
        ("heads", "5", "does not divide column 'hidden', 64"),
        ("tp", "8", "make them agree"),
        ("zero", "4", "write a stage of ZeRO, 0 to 3"),
        ("dp", "3", "make them agree"),
    ],
)
def test_cell_that_says_nothing_is_named_with_its_line_and_column(
    tmp_path: Path, column: str, cell: str, advice: str
) -> None:
    path = table(tmp_path / "odd.csv", [{**ROW, column: "1"}, {**ROW, column: cell}])
    if column in ROW:
        path = table(tmp_path / "odd.csv", [ROW, {**ROW, column: cell}])
    _, problems = read_rows([path])
    told = [one for one in problems if f"{path}:3: " in one]
    assert len(told) == 1
    assert column in told[0]
    assert advice in told[0]


def test_degrees_that_cut_more_than_there_is_are_refused(tmp_path: Path) -> None:
    rows = [
        {**ROW, "gpus": "8", "tp": "8", "pp": "1", "vpp": ""},
        {**ROW, "gpus": "8", "tp": "1", "pp": "8", "vpp": ""},
        {**ROW, "gpus": "4", "tp": "2", "pp": "2", "vpp": "2"},
    ]
    runs, problems = read_rows([table(tmp_path / "odd.csv", rows)])
    assert not runs
    assert "column 'tp' is 8, which does not divide column 'heads', 4" in problems[0]
    assert "column 'pp' is 8, more than column 'layers', 3" in problems[1]
    assert "'pp' and 'vpp' are 2 and 2, 4 stages, more than column 'layers', 3" in problems[2]


@pytest.mark.parametrize(("word", "is_true"), [("TRUE", True), ("yes", True), ("False", False)])
def test_words_are_read_in_any_case(tmp_path: Path, word: str, is_true: bool) -> None:
    cells = {"sp": word, "status": "OOM", "recompute": "Full", "precision": "BF16", "step_ms": ""}
    path = table(tmp_path / "loud.csv", [{**ROW, **cells, "attention": "Flash-2"}])
    (run,) = read_runs([path])
    assert run.sequence_parallel == is_true
    assert (run.status, run.recompute, run.precision) == ("oom", "full", "bf16")
    assert run.is_fused
    assert run.place == f"{path}:2"


def test_sizes_of_a_published_model_are_those_of_its_name(tmp_path: Path) -> None:
    named = {"gpu": "A100+V100", "gpus": "16", "seq": "2048", "gbs": "64", "model": ""}
    names = ("meta-llama/Llama-3.1-8B", "Llama-2-13b-hf", "gpt3-175B", "Qwen2.5-7B", "gpt2-xl")
    runs = read_runs([table(tmp_path / "r.csv", [named | {"model": name} for name in names])])
    assert [(run.layers, run.hidden, run.heads, run.ffn) for run in runs] == [
        (32, 4096, 32, 14336),
        (40, 5120, 40, 13824),
        (96, 12288, 96, 49152),
        (28, 3584, 28, 18944),
        (48, 1600, 25, 6400),
    ]
    assert runs[0].key_heads == 8
    with pytest.raises(ValueError, match="column 'hidden' is ''"):
        read_runs([table(tmp_path / "other.csv", [named | {"model": "mine-7b"}])])


def test_devices_of_two_kinds_are_half_of_each(tmp_path: Path) -> None:
    (run,) = read_runs([table(tmp_path / "r.csv", [{**ROW, "gpu": "A100+V100", "gpus": "16"}])])
    nodes = cluster_of(run, None).nodes
    assert [(one.device, one.devices, one.count) for one in nodes] == [
        ("A100-80GB", 8, 1),
        ("V100-16GB", 8, 1),
    ]


def test_file_without_what_every_run_needs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = {name: "1" for name in NEEDED if name != "heads"}
    for text, told in (
        (None, ":1: the header has no column 'heads'; add it"),
        ("", ":1: the header has no column 'gpu', 'gpus'"),
        (",".join(COLUMNS), "no rows; give files with a run a row"),
        (",".join([*COLUMNS, "mbs"]), "has column 'mbs' twice"),
    ):
        path = table(tmp_path / "bare.csv", [bare])
        if text is not None:
            path.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            main(["--runs", str(path)])
        assert told in capsys.readouterr().err


def test_unknown_cluster_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "runs.csv", [ROW])
    with pytest.raises(SystemExit, match="2"):
        main(["--runs", str(path), "--cluster", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


def test_every_row_is_scored_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that can be scored, one of another length, one that cannot be read, and some of which
    each cannot be predicted for another reason."""
    first = {**ROW, "cp": "1", "note": ""}
    rows = [
        first,
        {**first, "step_ms": "fast"},
        {**first, "gbs": "9"},
        {**first, "precision": "int4"},
        {**first, "precision": "fp16"},
        {**first, "cp": "2", "gpus": "4"},
        {**first, "note": "layers/stage=[7]"},
    ]
    path = table(tmp_path / "mixed.csv", rows)
    path.write_text("\ufeff" + path.read_text() + "Zeta-1,2\n")
    record = scored(tmp_path, path, code=1)
    assert [one.split(": ")[0] for one in record["unread"]] == [f"{path}:3", f"{path}:9"]
    assert "it has 2 cells, the header" in record["unread"][1]
    reasons = [one for part in parts(record) for one in part["reasons"]]
    told = {
        4: "column 'gbs' is 9, no multiple of 1 replicas (dp) of 2 samples (mbs)",
        5: "column 'precision' is 'int4'; write one of bf16",
        6: "add 'float16' to its 'flops'",
        7: "column 'cp' is 2",
    }
    assert len(reasons) == len(told)
    for line, reason in told.items():
        (own,) = [one for one in reasons if one.startswith(f"{path}:{line}: ")]
        assert reason in own
    sources = [part["sources"].get("mixed", {}) for part in parts(record)]
    count = sum(one.get("runs", 0) + len(one.get("contradicted", ())) for one in sources)
    assert count + len(reasons) + len(record["unread"]) == len(rows) + 1
    shown = capsys.readouterr()
    assert all(f"not predicted: {reason}" in shown.out for reason in reasons)
    assert "2 rows could not be read" in shown.err


def test_nodes_that_nothing_joins_are_told(tmp_path: Path) -> None:
    """A cluster of one node has no adapters, and no step for a run on two."""
    file = tmp_path / "one.yaml"
    nics = ", nic_bandwidth_bytes_s: 25GB/s"
    file.write_text(CLUSTER.replace(nics, "").replace("count: 2", "count: 1"))
    path = table(tmp_path / "runs.csv", [{**ROW, "gpus": "8", "dp": "4"}])
    (run,) = read_runs([path])
    with pytest.raises(ValueError, match="'nic_bandwidth_bytes_s'"):
        RunPredictor().predict(run, placed(run, find_cluster(str(file))))


def test_group_of_equal_steps_has_no_order() -> None:
    run = read_runs([FOLDER / "vtrain_single.csv"])[0]
    pairs = [(run, PredictedRun(step, 1.0, 2.0)) for step in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert score_of(pairs).spearman == 0.0
    failed = [(replace(run, status="error"), PredictedRun(1.0, 3.0, 2.0))]
    assert score_of(failed).precision is None


def test_runs_that_ran_out_of_memory_are_counted_by_what_is_said_of_them(tmp_path: Path) -> None:
    """Of three that ran out one is said to fit; of two that fitted one is said not to. What failed
    for another reason, or of which nothing is known, counts for neither."""
    cells = [
        ("ok", "2.5", "30"),
        ("OOM", "", ""),
        ("oom in step 3", "2.5", "30"),
        ("oom", "0", "nan"),
        ("", "2.5", ""),
        ("error", "2.5", "30"),
        ("", "", ""),
    ]
    names = ("status", "step_ms", "mem_gib")
    rows = [{**ROW, **dict(zip(names, cell, strict=True))} for cell in cells]
    found = read_runs([table(tmp_path / "runs.csv", rows)])
    assert [run.status for run in found] == ["ok", *["oom"] * 3, "ok", "error", "unknown"]
    assert [bool(run.step_s) for run in found] == [True, *[False] * 3, True, False, False]
    needed = (45, 90, 70, 100, 90, 90, 90)
    score = score_of(
        [
            (run, PredictedRun(0.0025, size * 2.0**30, 80 * 2.0**30))
            for run, size in zip(found, needed, strict=True)
        ]
    )
    assert (score.runs, score.error) == (2, pytest.approx(0.0))
    assert (score.known, score.ran_out, score.said_out) == (5, 3, 3)
    assert (score.precision, score.recall) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    # Of the first alone: what one that ran out held when it did is not what it needs.
    assert score.memory_error == pytest.approx(0.5)


def test_source_whose_runs_all_ran_out_has_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {**ROW, "step_ms": "", "status": "oom"}
    (part,) = parts(scored(tmp_path, table(tmp_path / "full.csv", [row])))
    source = part["sources"]["full"]
    assert (source["runs"], source["error"], source["scaled_error"]) == (0, None, None)
    assert (source["known"], source["recall"], source["precision"]) == (1, 0.0, None)
    assert "full: 0 of 1 are said not to fit, 1 did not" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_predict_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [("64", "8"), ("96", "8"), ("64", "7")]
    path = table(tmp_path / "a.csv", [{**ROW, "hidden": h, "gbs": n} for h, n in sizes])
    cluster = tmp_path / "elsewhere.yaml"
    cluster.write_text(CLUSTER)
    runs, _ = read_rows([path])
    monkeypatch.setattr(scoreboard_predict, "FEW", 1)
    one, two = (predict_all(runs, str(cluster), jobs) for jobs in (1, 2))
    assert len(one.pairs) == 2
    assert len(one.refused) == 1
    assert one == two


@pytest.mark.slow
def test_published_rows_refine_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "runs.csv", tmp_path / "mine.yaml"
    header, *rows = (FOLDER / "vtrain_single.csv").read_text().splitlines()
    file.write_text("\n".join([header, *rows[:200:40]]) + "\n")
    assert calibrate.main(["dgx-a100", str(file), "-o", str(out)]) == 0
    assert "for runs that are left out of the fit" in capsys.readouterr().out
    assert load_cluster(out).devices.keys() == find_cluster("dgx-a100").devices.keys()
