"""One rank of benchmarks/pipelines.py: all schedules, timed in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import pipeline_rows
import torch
import torch.distributed as dist
from throttle import Throttle, slowed_rows, throttled
from timed_rows import Settings, TimedRow, Times, run_worker
from torch import Tensor
from training_measure import usage_of

import shardweave as sw
from shardweave.backends.distributed.mail import Mail
from shardweave.benchmarks.bubble_bounds import bubble_bound_s
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of


def rows_of(settings: Settings) -> list[TimedRow]:
    """Ours and PyTorch's of each schedule, in the order of the table."""
    arguments = settings["model"], settings["micro_batches"]
    found: list[TimedRow] = []
    for case in pipeline_rows.CASES:
        if case.schedule not in settings["schedules"]:
            continue
        torch.manual_seed(0)
        found.append(pipeline_rows.our_row(case, *arguments, settings["cluster"]))
        if case.peer:
            torch.manual_seed(0)
            found.append(pipeline_rows.peer_row(case, *arguments))
    return found


def total(loss: Tensor) -> float:
    """Over the ranks, of which one has the loss, and the others zero."""
    found = loss.clone()
    dist.all_reduce(found)
    return float(found)


def result(
    throttle: Throttle, rows: list[TimedRow], times: dict[str, Times], settings: Settings
) -> Any:
    return [as_entry(throttle, row, times[row.name]["times_s"], settings) for row in rows]


def as_entry(
    throttle: Throttle, row: TimedRow, times_s: list[float], settings: Settings
) -> dict[str, Any]:
    """What the table shows of a row. Collective."""
    usage = asdict(usage_of(row))
    usage["peak_bytes"] = max(gathered(float(usage["peak_bytes"])))
    entry: dict[str, Any] = {
        "name": row.name,
        "times_s": times_s,
        **usage,
    }
    if row.program is not None:
        found = sw.simulate(row.program, settings["cluster"])
        assert isinstance(found, sw.PipelineSimulation)
        stages = found.stages
        lost_s, worked_s = throttle.lost_s, throttle.worked_s
        waited = [gathered(one) for one in waits_s(throttle, row, settings["rounds"])]
        worked_s, lost_s = throttle.worked_s - worked_s, throttle.lost_s - lost_s
        entry |= {
            "waited_s": [min(one) for one in waited],
            "worked_s": max(gathered(throttle.factor * worked_s / settings["rounds"])),
            "lost_s": max(gathered(lost_s / settings["rounds"])),
            "simulated_work_s": max(stage.compute_s for stage in stages),
            "bound_wait_s": bound_s(row.name.split()[1], row.program, found),
            "simulated_s": found.time_s,
            "simulated_wait_s": min(
                one.bubble_s + one.exposed_s.get("stage", 0.0) for one in stages
            ),
        }
    return entry


def bound_s(schedule: str, program: Program, found: sw.PipelineSimulation) -> float:
    """What a rank waits by the closed form of a schedule, in stages like those of most ranks."""
    ranks, functions = len(found.stages), functions_of(program)
    chunks = len({one.stage for one in functions.values()}) // ranks
    totals: dict[str, list[float]] = {}
    for event in found.events:
        by_rank = totals.setdefault(event.name, [0.0] * ranks)
        by_rank[int(event.stream.split()[1])] += event.end_s - event.start_s
    forward_s, whole_s, inputs_s, weights_s = (
        statistics.median(totals.get(name, [0.0])) / found.micro_batches
        for name in ("forward", "backward", "inputs", "weights")
    )
    return bubble_bound_s(schedule, ranks, chunks, forward_s, whole_s + inputs_s, weights_s)


def gathered(value: float) -> list[float]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def waits_s(throttle: Throttle, row: TimedRow, rounds: int) -> list[float]:
    """Seconds of each of some steps in which this rank waited for messages of other stages."""
    found: list[float] = []
    for _ in range(rounds):
        row.clear()
        dist.barrier()
        with timed(throttle) as waited:
            begin = time.perf_counter()
            row.run()
            took = torch.tensor(time.perf_counter() - begin)
        own_s = float(took)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        # A rank that is done waits for the others, too.
        found.append(sum(waited) + float(took) - own_s)
    return found


@contextmanager
def timed(throttle: Throttle) -> Iterator[list[float]]:
    """Lets receives, and the end of sends, note how long they take once the device is there."""
    waited: list[float] = []
    receive, close = Mail.receive, Mail.close

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            throttle.settle()
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


def main() -> None:
    throttle = Throttle(json.loads(sys.argv[1])["slow"])
    with throttled(throttle):
        make = lambda settings: slowed_rows(rows_of(settings), throttle)  # noqa: E731
        run_worker(make, partial(result, throttle), total)


if __name__ == "__main__":
    main()
