"""benchmarks/pipelines.py: what it compares, and how it shows it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as pytorch

from shardweave.benchmarks import pipelines, throttle
from shardweave.benchmarks.pipeline_rows import CASES, GPTStage, loss_of
from shardweave.docs.figures import schedules_of
from shardweave.driver.models.models import build_example
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES
from shardweave.tests.zoo import captured

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GPT = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=8,tie=false"


def test_every_schedule_is_compared_with_one_of_pytorch_where_that_has_it() -> None:
    assert {case.schedule for case in CASES} == set(PIPELINE_SCHEDULES)
    without = {case.schedule for case in CASES if not hasattr(pytorch, case.peer)}
    assert without == {"zero-bubble-h2", "list"}


def test_stages_of_the_peer_one_behind_the_other_are_the_model() -> None:
    example = build_example(GPT)
    x = example.kwargs["input_ids"]
    for layers in balanced_stages(captured(GPT).program, 4):
        x = GPTStage(example.module, layers)(x)
    loss = loss_of(x, example.kwargs["labels"])
    torch.testing.assert_close(loss, example.module(**example.kwargs))


def test_line_of_the_table_compares_with_ours() -> None:
    ours: dict[str, Any] = {
        "name": "shardweave 1f1b", "times_s": [0.3, 0.1, 0.2], "peak_bytes": 2**20,
        "waited_s": [0.05, 0.02, 0.06], "simulated_s": 0.16, "simulated_wait_s": 0.04,
        "worked_s": 0.14, "simulated_work_s": 0.12, "bound_wait_s": 0.032,
    }  # fmt: skip
    peer = {"name": "torch Schedule1F1B", "times_s": [0.4], "peak_bytes": 2**21}
    assert pipelines.cells(ours, ours) == [
        "shardweave 1f1b", "200.0 ms", "", "1.0 MiB", "140 ms", "120 ms", "25%", "25%", "20%", "160.0 ms",
    ]  # fmt: skip
    assert pipelines.cells(ours, peer) == [
        "torch Schedule1F1B", "400.0 ms", "0.50", "2.0 MiB", "", "", "", "", "", "",
    ]  # fmt: skip


def test_processes_that_share_a_core_are_devices_of_their_own_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [throttle.factor_for(ranks) for ranks in (1, 2, 3, 4)] == [1.0, 1.0, 2.5, 2.5]
    cluster = find_cluster("testbed")
    slower = throttle.slowed_cluster(replace(cluster, start_overhead_s=1e-4), 2.5)
    (before,), (after,) = cluster.devices.values(), slower.devices.values()
    assert after.flops["float32"] == pytest.approx(before.flops["float32"] / 2.5)
    assert slower.start_overhead_s == pytest.approx(2.5e-4)
    options = argparse.Namespace(micro_batches=8, rate="500mbit")
    titles = [
        pipelines.table_of({"ranks": 4, "slow": slow, "rows": []}, options).title
        for slow in (1.0, 2.5)
    ]
    assert titles == [
        "4 processes, 8 micro-batches, 500mbit link",
        "4 processes, each held to 1/2.5 of a core, 8 micro-batches, 500mbit link",
    ]


RESULTS = ("pipelines", "pipelines_4")


@pytest.mark.parametrize("name", RESULTS)
def test_result_has_every_schedule(name: str) -> None:
    rows = schedules_of(name)
    assert [row["name"].split()[1] for row, _ in rows] == [case.schedule for case in CASES]


@pytest.mark.parametrize("name", RESULTS)
def test_measured_schedules_are_within_their_bounds(name: str) -> None:
    rows = schedules_of(name)
    for row, peer in rows:
        time_s = statistics.median(row["times_s"])
        assert peer is None or time_s <= statistics.median(peer["times_s"]), row["name"]
        waits = statistics.median(row["waited_s"]) / time_s
        assert abs(waits - row["simulated_wait_s"] / row["simulated_s"]) <= 0.07, row["name"]
        assert row["worked_s"] <= 1.17 * row["simulated_work_s"], row["name"]


def test_list_is_the_fastest_as_simulated_and_level_with_it_as_measured() -> None:
    for name in RESULTS:
        rows = {row["name"].split()[1]: row for row, _ in schedules_of(name)}
        assert min(rows, key=lambda each: rows[each]["simulated_s"]) == "list"
        times_s = {each: statistics.median(row["times_s"]) for each, row in rows.items()}
        assert times_s["list"] <= 1.03 * min(times_s.values())


@pytest.mark.slow
def test_quick_run_measures_ours_and_the_peer(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "pipelines.py"), "--quick", "--ranks", "2"]
    command += ["--slow", "1.5"]
    command += ["--schedules", "1f1b,zero-bubble-v", "--json", str(out)]
    subprocess.run(command, check=True, timeout=900)
    (result,) = json.loads(out.read_text())["results"]
    names = [row["name"].split()[0] for row in result["rows"]]
    assert names == ["shardweave", "torch"] * 2
    assert all(row["peak_bytes"] > 0 for row in result["rows"])
