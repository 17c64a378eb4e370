"""One rank of benchmarks/training.py: the rows of one case, timed in turn."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import training_cases as cases
from timed_rows import Settings, TimedRow, Times, run_worker
from torch import Tensor
from training_measure import usage_of

from shardweave.planners.simulate.simulate import simulate


def rows_of(settings: Settings) -> list[TimedRow]:
    """Ours, and its peers."""
    case = next(case for case in cases.CASES if case.name == settings["case"])
    names = case.peers if settings["compile"] else case.peers[:1]
    if settings["compiled"]:
        names = tuple(name + cases.COMPILED for name in case.peers if name != "torch.compile")
    makers = [lambda: cases.our_row(case, settings["model"], compiled=settings["compiled"])]
    makers += [lambda n=n: cases.peer_row(n, case, settings["model"]) for n in names]
    rows: list[TimedRow] = []
    for make in makers:
        torch.manual_seed(0)
        rows.append(make())
    return rows


def mean_loss(loss: Tensor) -> float:
    """Over the ranks: DDP's and FSDP2's are of their rows."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def result(rows: list[TimedRow], times: dict[str, Times], settings: Settings) -> Any:
    return [as_entry(row, times[row.name], settings) for row in rows]


def as_entry(row: TimedRow, times: Times, settings: Settings) -> dict[str, Any]:
    """What the table shows of a row. Collective."""
    usage = usage_of(row)
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
    run_worker(rows_of, result, mean_loss)
