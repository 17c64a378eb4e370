"""One rank of benchmarks/auto_measured.py: the steps of some plans, timed in turn."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from throttle import Throttle, slowed_rows, throttled
from timed_rows import Settings, TimedRow, Times, run_worker

import shardweave as sw
from shardweave.driver.models.models import build_example


def rows_of(throttle: Throttle, settings: Settings) -> list[TimedRow]:
    """A row for each plan, on a model of its own with equal weights."""
    found: list[TimedRow] = []
    for name, path in settings["plans"].items():
        torch.manual_seed(0)
        example = build_example(settings["model"])
        step = sw.compile(
            example.module, kwargs=example.kwargs, plan=sw.Plan.load(path), backward="in_call"
        )

        def run(step: Any = step, batch: Any = example.kwargs) -> torch.Tensor:
            return step(**batch)

        found.append(TimedRow(name, run, [step], step.program))
    return slowed_rows(found, throttle)


def result(rows: list[TimedRow], times: dict[str, Times], settings: Settings) -> Any:
    return [{"name": row.name, **times[row.name]} for row in rows]


if __name__ == "__main__":
    own = Throttle(json.loads(sys.argv[1])["slow"])
    with throttled(own):
        run_worker(partial(rows_of, own), result)
