"""Rows of a table, timed in turn by the ranks of a benchmark."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardweave.driver.profile.profile_worker import awake, hasten_network_threads
from shardweave.ir.program.program import Program

TOLERANCE = 1e-4
"""Of the loss, in float32, between ways to compute it."""

Times = dict[str, list[float]]
"""Of each step of a row: `times_s`, on the slowest rank, and `processor_s`, of processor time on
this one."""


@dataclass(frozen=True)
class TimedRow:
    """A step to time. run: takes it and returns the loss. modules: whose gradients it makes.
    program: of ours."""

    name: str
    run: Callable[[], Tensor]
    modules: Sequence[nn.Module]
    program: Program | None = None

    def clear(self) -> None:
        """Set the gradients to None, as before each step."""
        for module in self.modules:
            module.zero_grad()


Settings = dict[str, Any]
Result = Callable[[list[TimedRow], dict[str, Times], Settings], Any]


def run_worker(
    make: Callable[[Settings], list[TimedRow]],
    result: Result,
    loss: Callable[[Tensor], float] = lambda loss: float(loss.detach()),
) -> None:
    """One rank of a benchmark, whose settings are its argument: times rows, and rank 0 writes.

    make: the rows. loss: of the whole batch, from what a row returns; collective, and the same for
    all rows, or the benchmark stops. result: what is written to the file `out` of the settings, as
    JSON data; collective.
    """
    settings: Settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with awake():
        rows = make(settings)
        for row in rows:
            for _ in range(2):
                row.run()
        hasten_network_threads()
        check_losses({row.name: loss(row.run()) for row in rows})
        times = time_in_turn(rows, settings["rounds"])
        found = result(rows, times, settings)
        if dist.get_rank() == 0:
            Path(settings["out"]).write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


def check_losses(losses: Mapping[str, float]) -> None:
    """Stop unless all rows compute the same loss."""
    if max(losses.values()) - min(losses.values()) > TOLERANCE:
        raise SystemExit(f"the rows disagree on the loss: {dict(losses)}")


def time_in_turn(rows: Sequence[TimedRow], rounds: int) -> dict[str, Times]:
    """Times of each row, by name; every other round goes through the rows backwards. Collective."""
    times: dict[str, Times] = {row.name: {"times_s": [], "processor_s": []} for row in rows}
    for turn in range(rounds):
        for row in rows if turn % 2 else reversed(rows):
            row.clear()
            gc.collect()
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            row.run()
            worked = time.process_time() - worked
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[row.name]["times_s"].append(float(took))
            times[row.name]["processor_s"].append(worked)
    return times
