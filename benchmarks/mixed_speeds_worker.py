"""One rank of benchmarks/mixed_speeds.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from throttle import Throttle, slowed_rows, throttled
from timed_rows import Settings, TimedRow, Times, run_worker

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.planners.plan.plan import Plan


def rows_of(settings: Settings, throttle: Throttle) -> list[TimedRow]:
    """A step for each plan."""
    found: list[TimedRow] = []
    for name, path in settings["plans"].items():
        example = build_example(settings["model"])
        step = sw.compile(example.module, kwargs=example.kwargs, plan=path, backward="in_call")
        run = lambda step=step, batch=example.kwargs: step(**batch)  # noqa: E731
        found.append(TimedRow(name, run, [step], step.program))
    return slowed_rows(found, throttle)


def result(rows: list[TimedRow], times: dict[str, Times], settings: Settings) -> Any:
    """What the table shows of each row."""
    return [as_entry(row, times[row.name]["times_s"], settings) for row in rows]


def as_entry(row: TimedRow, times_s: list[float], settings: Settings) -> dict[str, Any]:
    assert row.program is not None
    pipeline = Plan.load(settings["plans"][row.name]).pipeline
    assert pipeline is not None
    shares = pipeline.shares or ((pipeline.micro_batches,),)
    return {
        "name": row.name,
        "times_s": times_s,
        "simulated_s": sw.simulate(row.program, settings["cluster"]).time_s,
        "micro_batches": " ".join(",".join(map(str, own)) for own in shares),
        "layers": " | ".join(f"{own[0]}..{own[-1]}" for own in pipeline.stages),
    }


if __name__ == "__main__":
    own = Throttle(json.loads(sys.argv[1])["factors"][int(os.environ["RANK"])])
    with throttled(own):
        run_worker(lambda settings: rows_of(settings, own), result)
