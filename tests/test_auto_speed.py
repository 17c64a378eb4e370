"""benchmarks/auto_speed.py: its result is within the goals, and the page quotes it."""

from __future__ import annotations

import json
from pathlib import Path

from shardweave.benchmarks.auto_speed import CASES, GOALS_S

ROOT = Path(__file__).resolve().parent.parent


def test_planning_takes_no_longer_than_its_goals_and_the_page_quotes_it() -> None:
    record = json.loads((ROOT / "benchmarks/results/auto_speed.json").read_text())
    assert {"Llama-3-8B on 8x8", "Llama-3-8B on 1,024", "GPT-3 on 1,024"} <= set(record)
    assert set(record) <= set(CASES)
    assert set(CASES) == set(GOALS_S)
    page = (ROOT / "docs/planning.md").read_text()
    for name, row in record.items():
        assert row["plan_s"] <= GOALS_S[name], name
        assert row["peak_bytes"] <= 4 * 2**30, name
        seconds = f"{row['capture_s']:.0f} s | {row['plan_s']:.1f} s"
        assert f"| {name} | {seconds} | {row['peak_bytes'] / 2**30:.1f} GiB |" in page
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
