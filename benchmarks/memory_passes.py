"""Simulated steps of large models with and without the passes that save memory or hide messages.

`python benchmarks/memory_passes.py [--cases NAME ..] [--quick] [--json OUT]` fixes a point of
`auto`'s space for each case and changes one dimension at a time: what the host keeps, the chunks of
the loss, decomposed products. A row without seconds does not fit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.auto_speed import LLAMA, LLAMA_8B, LLAMA_405B
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.planners.call import call_planner
from shardweave.planners.plan.plan_parts import PlanError

LLAMA_70B = f"{LLAMA},hidden_size=8192,num_hidden_layers=80,num_attention_heads=64"
ALONE = "stages=1,context=1,schedule=in-order,sub_batches=1,sequence_parallel=true"

CASES: Mapping[str, tuple[str, str, str]] = {
    "Llama-3-8B, 8 H100": (
        f"{LLAMA_8B},intermediate_size=14336,batch=8,seq=8192",
        "h100-pod:nodes=1",
        f"{ALONE},tensor=8,data=1,zero=0,recompute=layer,micro_batches=1",
    ),
    "Llama-3-70B, 16 H100, sequence 32,768": (
        f"{LLAMA_70B},intermediate_size=28672,batch=16,seq=32768",
        "h100-pod:nodes=2",
        f"{ALONE},tensor=8,data=2,zero=3,recompute=layer,micro_batches=8",
    ),
    "Llama-3-405B, 64 H100": (
        f"{LLAMA_405B},intermediate_size=53248,batch=64,seq=8192",
        "h100-pod:nodes=8",
        f"{ALONE},tensor=8,data=8,zero=3,recompute=layer,micro_batches=8",
    ),
}
"""Model, cluster, and the point whose dimensions change."""

PLAIN = {"offload": "none", "loss_chunks": "1", "decompose": "false"}
CHANGES = (
    {},
    {"loss_chunks": "16"},
    {"decompose": "true"},
    {"offload": "inputs"},
    {"offload": "states"},
    {"offload": "all+states"},
)
QUICK = "Llama-3-8B, 8 H100"


def rows_of(name: str) -> list[dict[str, Any]]:
    """Simulate a case with each of CHANGES."""
    spec, cluster, point = CASES[name]
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    rows: list[dict[str, Any]] = []
    for change in CHANGES:
        fix = ",".join([point, *(f"{key}={value}" for key, value in {**PLAIN, **change}.items())])
        options = {"fix": fix, "propose": False}
        row: dict[str, Any] = {"case": name, "point": point, **change}
        try:
            plan = call_planner("auto", program, None, cluster=cluster, options=options)
        except PlanError as error:
            row["refused"] = str(error)
        else:
            assert plan.predicted is not None, "a plan of auto is simulated"
            row["time_s"] = plan.predicted.time_s
            row["memory_bytes"] = dict(plan.predicted.memory_bytes)
            row["peak_bytes"] = plan.predicted.peak_bytes
        print(_line(row, change), flush=True)
        rows.append(row)
    return rows


def _line(row: Mapping[str, Any], change: Mapping[str, str]) -> str:
    words = ", ".join(f"{key} {value}" for key, value in change.items()) or "none"
    if "refused" in row:
        return f"{row['case']:40} {words:22} {row['refused']}"
    gib = row["peak_bytes"] / 2**30
    return f"{row['case']:40} {words:22} {row['time_s']:.2f} s, {gib:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    options = parser.parse_args(arguments)
    rows = [row for name in ([QUICK] if options.quick else options.cases) for row in rows_of(name)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
