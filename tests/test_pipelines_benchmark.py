"""benchmarks/pipelines.py: what it compares, and how it shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as pytorch

from shardweave.benchmarks import pipelines
from shardweave.benchmarks.pipeline_rows import CASES, GPTStage, loss_of
from shardweave.driver.models import build_example
from shardweave.planners.pipelines.balance import balanced_stages
from shardweave.planners.plan_parts import PIPELINE_SCHEDULES
from shardweave.tests.zoo import captured

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
GPT = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=8,tie=false"


def test_every_schedule_is_compared_and_all_but_our_own_with_one_of_pytorch() -> None:
    assert {case.schedule for case in CASES} == set(PIPELINE_SCHEDULES)
    assert all(hasattr(pytorch, case.peer) for case in CASES if case.schedule != "list")


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
    }  # fmt: skip
    peer = {"name": "torch Schedule1F1B", "times_s": [0.4], "peak_bytes": 2**21}
    assert pipelines.cells(ours, ours) == [
        "shardweave 1f1b", "200.0 ms", "", "1.0 MiB", "25%", "25%", "160.0 ms",
    ]  # fmt: skip
    assert pipelines.cells(ours, peer) == [
        "torch Schedule1F1B", "400.0 ms", "0.50", "2.0 MiB", "", "", "",
    ]  # fmt: skip


@pytest.mark.slow
def test_quick_run_measures_ours_and_the_peer(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "pipelines.py"), "--quick", "--ranks", "2"]
    command += ["--schedules", "1f1b,zero-bubble-v", "--json", str(out)]
    subprocess.run(command, check=True, timeout=900)
    (result,) = json.loads(out.read_text())["results"]
    names = [row["name"].split()[0] for row in result["rows"]]
    assert names == ["shardweave", "torch"] * 2
    assert all(row["peak_bytes"] > 0 for row in result["rows"])
