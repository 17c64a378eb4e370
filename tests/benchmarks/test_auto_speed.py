"""benchmarks/auto_speed.py: its result is within the goals, and the page quotes it."""

from __future__ import annotations

import json
from pathlib import Path

from shardweave.benchmarks.auto_speed import CASES, GOALS_S
from shardweave.benchmarks.step_parts import POINT

PAGE = "docs/planning.md"
ROOT = Path(__file__).resolve().parents[2]


def test_planning_takes_no_longer_than_its_goals_and_the_page_quotes_it() -> None:
    record = json.loads((ROOT / "benchmarks/results/auto_speed.json").read_text())
    assert {"Llama-3-8B on 8x8", "Llama-3-8B on 1,024", "GPT-3 on 1,024"} <= set(record)
    assert set(record) <= set(CASES)
    assert set(CASES) == set(GOALS_S)
    page = (ROOT / PAGE).read_text()
    for name, row in record.items():
        assert row["plan_s"] <= GOALS_S[name], name
        assert row["peak_bytes"] <= 4 * 2**30, name
        seconds = f"{row['capture_s']:.0f} s | {row['plan_s']:.1f} s"
        assert f"| {name} | {seconds} | {row['peak_bytes'] / 2**30:.1f} GiB |" in page
    spread = max(max(row["plan_each_s"]) / row["plan_s"] for row in record.values())
    assert f"took up to {spread:.1f} times as long" in " ".join(page.split())
    shares = [
        (row["device_flops_s"], row["published_flops_s"])
        for row in record.values()
        if row["published_flops_s"]
    ]
    found, published = (
        " and ".join(f"{rate / 1e12:.0f}" for rate in each) for each in zip(*shares, strict=True)
    )
    assert f"{found} TFLOP/s a device" in " ".join(page.split())
    assert f"where {published} were published" in page


def test_page_says_where_the_seconds_of_long_sequences_go() -> None:
    found = json.loads((ROOT / "benchmarks/results/step_parts.json").read_text())
    speed = json.loads((ROOT / "benchmarks/results/auto_speed.json").read_text())
    row = speed["Llama-3-405B on 16,384, context 16"]
    assert row["plan"] == str(POINT)
    step_s = found.pop("step")
    assert abs(step_s - row["step_s"]) < 1e-6
    assert abs(step_s - sum(found.values())) < 0.01 * step_s
    page = " ".join((ROOT / PAGE).read_text().split())
    flops = row["device_flops_s"] * step_s
    published_s = flops / row["published_flops_s"]
    # The bubble grows with what a block takes: of 16 micro-batches and 8 chunks by 15 / (8 x 16).
    filling = 1 + 15 / 128
    said = [
        f"at 380 TFLOP/s take {published_s:.1f} s",
        f"Of those {step_s:.1f} s",
        f"attention takes {found['attention']:.1f} (",
        f"other products {found['products']:.1f}",
        f"draining the pipeline {found['bubble']:.1f}",
        f"over `tensor` {found['messages over tensor']:.1f}",
        f"over `context` {found['messages over context']:.1f}",
        f"between stages {found['between stages']:.1f}",
        f"pointwise ops {found['pointwise']:.1f}",
        f"is computed in {found['merging']:.1f}",
        f"is {step_s - published_s:.1f} s faster",
        f"would save {filling * found['attention'] * (1 - 0.35 / 0.5):.1f} s",
        f"in Megatron-LM, {filling * found['merging']:.1f} s",
    ]
    assert [words for words in said if words not in page] == []
