"""How long `auto` takes after capture, and how much memory, for models and clusters of real sizes.

`python benchmarks/auto_speed.py [--cases NAME ..] [--rounds N] [--quick] [--json OUT]` plans each
case in a process of its own, so that its peak memory is its own, and prints seconds of processor
time (of the wall in brackets) for capture and for planning, the peak of the process, the plan, its
simulated step, and the FLOP/s of the model that this gives a device, beside what was published of
such a run. Of several rounds the one that planned in the least time is shown, as with `timeit`: the
rest is what else the machine did. The most seconds are beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.planners.call import call_planner
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.predict.throughput import model_flops

LLAMA = "hf:llama:vocab_size=128256,num_key_value_heads=8,max_position_embeddings=131072"
LLAMA_8B = f"{LLAMA},hidden_size=4096,num_hidden_layers=32,num_attention_heads=32"
LLAMA_405B = f"{LLAMA},hidden_size=16384,num_hidden_layers=126,num_attention_heads=128"
GPT_3 = "gpt:layers=96,hidden=12288,heads=96,vocab=51200,seq=2048"

CASES: Mapping[str, tuple[str, str, str]] = {
    "Llama-3-8B on 8x8": (
        f"{LLAMA_8B},intermediate_size=14336,batch=128,seq=4096",
        "h100-pod",
        "",
    ),
    "Llama-3-8B on 1,024": (
        f"{LLAMA_8B},intermediate_size=14336,batch=2048,seq=4096",
        "h100-pod:nodes=128",
        "",
    ),
    "GPT-3 on 1,024": (f"{GPT_3},batch=1536", "h100-pod:nodes=128", ""),
    "Llama-3-405B on 16,384": (
        f"{LLAMA_405B},intermediate_size=53248,batch=2048,seq=8192",
        "h100-pod:nodes=2048",
        "tensor=8,stages=16",
    ),
    "Llama-3-405B on 8,192": (
        f"{LLAMA_405B},intermediate_size=53248,batch=2048,seq=8192",
        "h100-pod:nodes=1024",
        "tensor=8,stages=16",
    ),
    "Llama-3-405B on 16,384, context 16": (
        f"{LLAMA_405B},intermediate_size=53248,batch=128,seq=131072",
        "h100-pod:nodes=2048",
        "tensor=8,context=16,stages=16",
    ),
}
"""Model, cluster, and what is fixed."""

QUICK = "Llama-3-8B on 8x8"
"""The case of a quick run."""

GOALS_S: Mapping[str, float] = {
    "Llama-3-8B on 8x8": 10.0,
    "Llama-3-8B on 1,024": 60.0,
    "GPT-3 on 1,024": 60.0,
    "Llama-3-405B on 8,192": 120.0,
    "Llama-3-405B on 16,384": 120.0,
    "Llama-3-405B on 16,384, context 16": 120.0,
}
"""Seconds of planning, after capture."""

PUBLISHED: Mapping[str, float] = {
    "Llama-3-405B on 8,192": 430e12,
    "Llama-3-405B on 16,384": 400e12,
    "Llama-3-405B on 16,384, context 16": 380e12,
}
"""FLOP/s of the model for each device (Grattafiori et al. 2024, Table 4)."""


def measure(name: str) -> dict[str, Any]:
    """Plan one case in this process."""
    spec, cluster, fix = CASES[name]
    start_s = time.process_time()
    with FakeTensorMode():
        example = build_example(spec, dtype=torch.bfloat16)
    program = capture(example.module, kwargs=example.kwargs)
    captured_s, wall_s = time.process_time(), time.perf_counter()
    plan = call_planner("auto", program, None, cluster=cluster, options={"fix": fix})
    assert plan.predicted is not None, "a plan of auto is simulated"
    planned_s, planned_wall_s = time.process_time(), time.perf_counter()
    devices = find_cluster(cluster).num_devices
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "capture_s": captured_s - start_s,
        "plan_s": planned_s - captured_s,
        "plan_wall_s": planned_wall_s - wall_s,
        "peak_bytes": peak_bytes,
        "step_s": plan.predicted.time_s,
        "memory_bytes": plan.predicted.peak_bytes,
        "device_flops_s": model_flops(program) / plan.predicted.time_s / devices,
        "published_flops_s": PUBLISHED.get(name),
        "plan": plan.candidates[0].name,
        "reasons": list(plan.reasons[:1]),
    }


def in_own_process(name: str) -> dict[str, Any] | None:
    """What `measure` returns in another process; None if that fails, which is printed."""
    command = [sys.executable, "-m", "shardweave.benchmarks.auto_speed", "--here"]
    done = subprocess.run([*command, "--cases", name], capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: failed: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _published(row: Mapping[str, Any]) -> str:
    found = row["published_flops_s"]
    return f" (published {found / 1e12:.0f})" if found else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=1, help="times each case is planned")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases = [QUICK]
    if options.here:
        print(json.dumps(measure(options.cases[0])))
        return 0
    record: dict[str, Any] = {}
    for name in options.cases:
        found = [row for _ in range(options.rounds) if (row := in_own_process(name)) is not None]
        if len(found) < options.rounds:
            continue
        row = record[name] = min(found, key=lambda one: one["plan_s"])
        row["plan_each_s"] = [one["plan_s"] for one in found]
        most_s = f", of {len(found)} rounds the most {max(row['plan_each_s']):.1f}"
        print(
            f"{name}: capture {row['capture_s']:.1f} s, plan {row['plan_s']:.1f} s of processor "
            f"time ({row['plan_wall_s']:.1f}{most_s if len(found) > 1 else ''}), "
            f"{row['peak_bytes'] / 2**30:.1f} GiB; {row['plan']}: "
            f"{row['step_s']:.3f} s, {row['memory_bytes'] / 2**30:.1f} GiB and "
            f"{row['device_flops_s'] / 1e12:.0f} TFLOP/s a device{_published(row)}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    late = [name for name, row in record.items() if row["plan_s"] > GOALS_S[name]]
    print(f"slower than the goal: {', '.join(late) or 'none'}")
    return 0 if len(record) == len(options.cases) and not late else 1


if __name__ == "__main__":
    sys.exit(main())
