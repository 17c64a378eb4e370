"""One rank of benchmarks/training.py: the rows of one case, timed in turn."""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training_cases as cases
from torch import Tensor
from training_measure import usage_of

from shardweave.driver.steady import awake, hasten_network_threads
from shardweave.planners.cost.simulate import simulate

TOLERANCE = 1e-4
"""Of the loss, in float32, between ways to compute it."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = next(case for case in cases.CASES if case.name == settings["case"])
    with awake():
        names = case.peers if settings["compile"] else case.peers[:1]
        makers = [lambda: cases.our_row(case, settings["model"])]
        makers += [lambda n=n: cases.peer_row(n, case, settings["model"]) for n in names]
        rows = []
        for make in makers:
            torch.manual_seed(0)
            rows.append(make())
        for row in rows:
            for _ in range(2):
                row.forward_backward()
        hasten_network_threads()
        check(rows)
        times = time_in_turn(rows, settings["rounds"])
        entries = [as_entry(row, times[row.name], settings) for row in rows]
        if dist.get_rank() == 0:
            Path(settings["out"]).write_text(json.dumps(entries))
        dist.barrier()
    dist.destroy_process_group()


def check(rows: list[cases.Row]) -> None:
    """Stop unless the rows compute the same loss."""
    losses = {row.name: mean_loss(row.forward_backward()) for row in rows}
    if max(losses.values()) - min(losses.values()) > TOLERANCE:
        raise SystemExit(f"the methods disagree on the loss: {losses}")


def mean_loss(loss: Tensor) -> float:
    """Over the ranks: DDP's and FSDP2's are of their rows."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


Times = dict[str, list[float]]
"""Of each step of a row: seconds on the slowest rank, and of processor time on rank 0."""


def time_in_turn(rows: list[cases.Row], rounds: int) -> dict[str, Times]:
    """Times of each row, whose gradients are set to None before each step."""
    times: dict[str, Times] = {row.name: {"times_s": [], "processor_s": []} for row in rows}
    for turn in range(rounds):
        for row in rows if turn % 2 else reversed(rows):
            row.module.zero_grad()
            gc.collect()
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            row.forward_backward()
            worked = time.process_time() - worked
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[row.name]["times_s"].append(float(took))
            times[row.name]["processor_s"].append(worked)
    return times


def as_entry(row: cases.Row, times: Times, settings: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of a row. Collective."""
    row.module.zero_grad()
    usage = usage_of(row.forward_backward)
    entry: dict[str, Any] = {"name": row.name, **times, **asdict(usage)}
    if row.program is not None:
        result = simulate(row.program, settings["cluster"])
        entry |= {
            "simulated_s": result.time_s,
            "lower_bound_s": result.lower_bound_s,
            "communication_s": sum(result.communication_s.values()),
            "simulated_bytes": result.peak_bytes,
        }
    return entry


if __name__ == "__main__":
    main()
