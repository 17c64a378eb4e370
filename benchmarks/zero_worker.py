"""One rank of benchmarks/zero.py."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import zero_rows
from timed_rows import Settings, TimedRow, Times, run_worker
from training_measure import usage_of


def rows_of(settings: Settings) -> list[TimedRow]:
    """Ours and FSDP2's, of each stage of ZeRO."""
    found: list[TimedRow] = []
    for zero in (1, 2, 3):
        for make in (zero_rows.our_row, zero_rows.peer_row):
            torch.manual_seed(0)
            found.append(make(zero, settings["model"], settings["micro_batches"]))
    return found


def mean_loss(loss: Tensor) -> float:
    """Over the ranks: FSDP2's are of their rows."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def result(rows: list[TimedRow], times: dict[str, Times], settings: Settings) -> Any:
    """What the table shows of each row. Collective."""
    return [as_entry(row, times[row.name], 1 + index // 2) for index, row in enumerate(rows)]


def as_entry(row: TimedRow, times: Times, zero: int) -> dict[str, Any]:
    usage = asdict(usage_of(row))
    with zero_rows.watched() as seen:
        held = zero_rows.held_bytes(row)
    whole_bytes = sum(p.numel() * p.element_size() for m in row.modules for p in m.parameters())
    textbook = zero_rows.textbook_bytes(zero, whole_bytes, dist.get_world_size())
    if row.program is not None:
        held["in a step"] = sum(seen.values())
    shares = {part: size / textbook[part] for part, size in held.items()}
    return {"name": row.name, **times, **usage, "held_bytes": held, "shares": shares}


if __name__ == "__main__":
    run_worker(rows_of, result, mean_loss)
