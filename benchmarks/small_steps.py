"""A step of a small model beside eager's, in a loop, and after what a loop does not do.

`python benchmarks/small_steps.py [--rounds N] [--json FILE] [--quick]`: forward and backward of a
GPT of hidden 32 on one process with one thread, where most of the time is Python's. Both are timed
in turn, in a plain loop, and again with a garbage collection before each step, as
`benchmarks/training.py` has it: that walks all objects, so that a step finds none in the caches.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import shardweave as sw
from shardweave.driver.models.models import build_example

MODEL = "gpt:layers=4,hidden=32,heads=4,vocab=64,seq=32,batch=4,tie=false"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500, help="timed steps of each")
    parser.add_argument("--machine", default="2-core x86-64 CPU, torch CPU build")
    parser.add_argument("--json", default="", help="write the times to this file")
    parser.add_argument("--quick", action="store_true", help="ten rounds")
    parser.add_argument("--backward", default="in_call", choices=("in_call", "autograd"))
    options = parser.parse_args()
    rounds = 10 if options.quick else options.rounds
    torch.set_num_threads(1)
    example = build_example(MODEL)
    eager = copy.deepcopy(example.module)
    is_in_call = options.backward == "in_call"
    step = sw.compile(example.module, kwargs=example.kwargs, backward=options.backward)

    def run_eager() -> None:
        eager(**example.kwargs).backward()

    def run_step() -> None:
        loss = step(**example.kwargs)
        if not is_in_call:
            loss.backward()

    steps = [(eager, run_eager), (step, run_step)]
    rows = {
        "in a loop": times(steps, rounds, lambda: None),
        "after a garbage collection": times(steps, max(5, rounds // 5), gc.collect),
    }
    table = Table(title="A step of hidden 32, medians")
    for title in ("", "eager", "shardweave", "of eager's"):
        table.add_column(title)
    for name, (of_eager, ours) in rows.items():
        medians = statistics.median(of_eager), statistics.median(ours)
        seconds = [f"{1e3 * one:.2f} ms" for one in medians]
        table.add_row(name, *seconds, f"{medians[1] / medians[0]:.2f}")
    Console().print(table)
    if options.json:
        record = {"machine": options.machine, "model": MODEL, "rows": rows}
        Path(options.json).write_text(json.dumps(record) + "\n")
    return 0


def times(
    steps: list[tuple[Any, Callable[[], None]]], rounds: int, before: Callable[[], object]
) -> list[list[float]]:
    """Seconds of each step, which are taken in turn."""
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(-20, rounds):
        for (module, run), own in zip(steps, found, strict=True):
            module.zero_grad()
            before()
            start_s = time.perf_counter()
            run()
            if turn >= 0:
                own.append(time.perf_counter() - start_s)
    return found


if __name__ == "__main__":
    sys.exit(main())
