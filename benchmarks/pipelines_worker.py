"""One rank of benchmarks/pipelines.py: all schedules, timed in turn."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pipeline_rows as rows
import torch
import torch.distributed as dist
from training_measure import usage_of

import shardweave as sw
from shardweave.backends.mail import Mail
from shardweave.driver.steady import awake, hasten_network_threads

TOLERANCE = 1e-4
"""Of the loss, in float32, between ways to compute it."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with awake():
        made: list[rows.Row] = []
        for case in rows.CASES:
            if case.schedule in settings["schedules"]:
                made += rows_of(case, settings)
        for row in made:
            for _ in range(2):
                row.run()
        hasten_network_threads()
        check(made)
        times = time_in_turn(made, settings["rounds"])
        entries = [as_entry(row, times[row.name], settings) for row in made]
        if dist.get_rank() == 0:
            Path(settings["out"]).write_text(json.dumps(entries))
        dist.barrier()
    dist.destroy_process_group()


def rows_of(case: rows.Case, settings: dict[str, Any]) -> list[rows.Row]:
    arguments = settings["model"], settings["micro_batches"]
    torch.manual_seed(0)
    found = [rows.our_row(case, *arguments, settings["cluster"])]
    if case.peer:
        torch.manual_seed(0)
        found.append(rows.peer_row(case, *arguments))
    return found


def check(made: list[rows.Row]) -> None:
    """Stop unless the rows compute the same loss."""
    losses: dict[str, float] = {}
    for row in made:
        loss = row.run().clone()
        dist.all_reduce(loss)
        losses[row.name] = float(loss)
    if max(losses.values()) - min(losses.values()) > TOLERANCE:
        raise SystemExit(f"the schedules disagree on the loss: {losses}")


def clear(row: rows.Row) -> None:
    for module in row.modules:
        module.zero_grad()


def time_in_turn(made: list[rows.Row], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step of a row on the slowest rank; gradients are None before it."""
    times: dict[str, list[float]] = {row.name: [] for row in made}
    for turn in range(rounds):
        for row in made if turn % 2 else reversed(made):
            clear(row)
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            row.run()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[row.name].append(float(took))
    return times


def as_entry(row: rows.Row, times_s: list[float], settings: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of a row. Collective."""
    clear(row)
    usage = asdict(usage_of(row.run))
    usage["peak_bytes"] = max(gathered(float(usage["peak_bytes"])))
    entry: dict[str, Any] = {
        "name": row.name,
        "times_s": times_s,
        **usage,
    }
    if row.program is not None:
        waited = [gathered(one) for one in waits_s(row, settings["rounds"])]
        found = sw.simulate(row.program, settings["cluster"])
        assert isinstance(found, sw.PipelineSimulation)
        stages = found.stages
        entry |= {
            "waited_s": [min(one) for one in waited],
            "simulated_s": found.time_s,
            "simulated_wait_s": min(
                one.bubble_s + one.exposed_s.get("stage", 0.0) for one in stages
            ),
        }
    return entry


def gathered(value: float) -> list[float]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def waits_s(row: rows.Row, rounds: int) -> list[float]:
    """Seconds of each of some steps in which this rank waited for messages of other stages."""
    found: list[float] = []
    for _ in range(rounds):
        clear(row)
        dist.barrier()
        with timed() as waited:
            begin = time.perf_counter()
            row.run()
            took = torch.tensor(time.perf_counter() - begin)
        own_s = float(took)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        # A rank that is done waits for the others, too.
        found.append(sum(waited) + float(took) - own_s)
    return found


@contextmanager
def timed() -> Iterator[list[float]]:
    """Lets receives, and the end of sends, note how long they take."""
    waited: list[float] = []
    receive, close = Mail.receive, Mail.close

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                waited.append(time.perf_counter() - begin)

        return call

    Mail.receive, Mail.close = timing(receive), timing(close)
    try:
        yield waited
    finally:
        Mail.receive, Mail.close = receive, close


if __name__ == "__main__":
    main()
