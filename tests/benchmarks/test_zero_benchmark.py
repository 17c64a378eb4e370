"""Memory of ZeRO 1, 2 and 3: what ranks hold, and what is simulated, are the textbook's."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardweave.benchmarks import zero
from shardweave.benchmarks.zero_rows import held_bytes, our_row, textbook_bytes, watched
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.predict.predict import simulation_of
from shardweave.tests.spawn import run_ranks
from shardweave.tests.zoo import captured, megatron

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GPT = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=8,batch=16,tie=false"
WITHIN = 0.02
MICRO_BATCHES = 2


def measured(stages: tuple[int, ...]) -> list[tuple[dict[str, int], int]]:
    """By stage of ZeRO, the bytes that this rank holds by part, and those of all parameters."""
    torch.set_num_threads(1)
    found: list[tuple[dict[str, int], int]] = []
    for stage in stages:
        row = our_row(stage, GPT, MICRO_BATCHES)
        with watched() as seen:
            held = held_bytes(row)
        whole = sum(p.numel() * p.element_size() for p in row.modules[0].parameters())
        found.append((held | {"in a step": sum(seen.values())}, whole))
    return found


def check(stages: tuple[int, ...], ranks: int) -> None:
    for results in run_ranks(measured, ranks, stages):
        for stage, (held, whole_bytes) in zip(stages, results, strict=True):
            assert held == pytest.approx(textbook_bytes(stage, whole_bytes, ranks), rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_what_the_textbook_says_of_every_stage(ranks: int) -> None:
    check((1, 2, 3), ranks)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_simulated_memory_by_part_is_the_textbook(stage: int) -> None:
    ranks, found = 4, captured(GPT)
    plan = replace(
        megatron(GPT, f"data={ranks}"),
        zero=stage,
        pipeline=Pipeline((("*",),), MICRO_BATCHES),
    )
    result = simulation_of(Lowerings.of(found.program), plan, find_cluster("testbed:nodes=4"))
    assert isinstance(result, PipelineSimulation)
    parameters = list(found.example.module.parameters())
    whole_bytes = sum(p.numel() * p.element_size() for p in parameters)
    textbook = textbook_bytes(stage, whole_bytes, ranks)
    parts = result.stages[0].memory_parts
    for part in ("parameters", "optimizer"):
        assert parts[part] == pytest.approx(textbook[part], rel=WITHIN)


def test_line_of_the_table_compares_with_ours() -> None:
    ours: dict[str, Any] = {
        "name": "shardweave ZeRO 1", "times_s": [0.3, 0.1, 0.2], "peak_bytes": 2**20,
        "sent_bytes": 2**19, "shares": {"parameters": 1.0, "in a step": 0.999},
    }  # fmt: skip
    peer = ours | {"name": "FSDP2 as ZeRO 1", "times_s": [0.4], "shares": {"parameters": 1.0}}
    assert zero.cells(ours, ours) == [
        "shardweave ZeRO 1", "200.0 ms", "", "1.00 MiB", "0.50 MiB", "1.000", "", "", "0.999",
    ]  # fmt: skip
    assert zero.cells(ours, peer)[:3] == ["FSDP2 as ZeRO 1", "400.0 ms", "0.50"]


def test_every_stage_takes_less_than_fsdp2_in_the_memory_of_the_textbook() -> None:
    results = json.loads((BENCHMARKS / "results" / "zero.json").read_text())["results"]
    assert [result["ranks"] for result in results] == [2, 4]
    for stage in (1, 2, 3):
        pairs = [[row for row in r["rows"] if f"ZeRO {stage}" in row["name"]] for r in results]
        times = [ours_of_theirs([statistics.median(row["times_s"]) for row in p]) for p in pairs]
        assert max(times) <= 1.0
        assert ours_of_theirs([row["sent_bytes"] for row in pairs[-1]]) <= 1.0
        for row in (row for pair in pairs for row in pair):
            assert all(abs(share - 1) < WITHIN for share in row["shares"].values())


def ours_of_theirs(pair: list[float]) -> float:
    ours, theirs = pair
    return ours / theirs


@pytest.mark.slow
def test_quick_run_measures_ours_and_fsdp2(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "zero.py"), "--quick", "--ranks", "2"]
    subprocess.run([*command, "--json", str(out)], check=True, timeout=900)
    (result,) = json.loads(out.read_text())["results"]
    assert [row["name"].split()[0] for row in result["rows"]] == ["shardweave", "FSDP2"] * 3
    for row in result["rows"]:
        assert all(abs(share - 1) < WITHIN for share in row["shares"].values())
