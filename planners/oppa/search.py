"""The search: choose, try, keep; over and over. It knows neither clusters nor processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planners.oppa.choosers import Chooser, History
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.trials.space import Configuration, SpaceTable
from shardweave.planners.trials.trials import Deadline, Record, Trial, TrialFile


@dataclass(frozen=True)
class Found:
    """Result of a search. records: all trials in order. best: the fastest that fits, if any."""

    records: tuple[Record, ...]
    best: Record | None


Progress = Callable[[Sequence[Record]], None]
"""Callback after every trial; its argument is all trials so far."""


def run_trials(
    configurations: Sequence[Configuration],
    trial: Trial,
    chooser: Chooser,
    trials: int,
    *,
    memory_bytes: float | None = None,
    time_limit_s: float = 0.0,
    seed: int = 0,
    file: TrialFile | None = None,
    progress: Progress | None = None,
) -> Found:
    """Try configurations until there are `trials` trials, or all configurations were tried.

    trials: includes those of earlier searches. time_limit_s: seconds after which no trial begins,
    except the first of all; 0: no limit. memory_bytes: memory of a device; a trial that needs more
    does not fit. file: keeps the trials; a search continues after those in it, and makes the
    choices that it would have made without the interruption (random numbers depend on seed and
    number of the trial).

    Raises PlanError if the file has a trial of a configuration that is not among these.
    """
    table = SpaceTable.of(configurations)
    row_of = {c: row for row, c in enumerate(configurations)}
    records = list(file.records) if file else []
    rows = _rows(file, row_of) if file else []
    limit = Deadline(time_limit_s)
    while len(rows) < min(trials, len(configurations)):
        if rows and limit.is_past:
            break
        history = History(table, rows, records, memory_bytes)
        choice = chooser.choose(history, np.random.default_rng([seed, len(rows)]))
        start_s = time.monotonic()
        outcome = trial(configurations[choice.row])
        seconds = time.monotonic() - start_s
        record = Record(configurations[choice.row], outcome, choice.reason, seconds)
        if file is not None:
            file.add(record)
        rows.append(choice.row)
        records.append(record)
        if progress is not None:
            progress(records)
    history = History(table, rows, records, memory_bytes)
    kept = [record for record in records if history.fits(record)]
    best = max(kept, key=lambda record: record.outcome.throughput, default=None)
    return Found(tuple(records), best)


def _rows(file: TrialFile, row_of: Mapping[Configuration, int]) -> list[int]:
    rows: list[int] = []
    for number, record in enumerate(file.records, start=2):
        row = row_of.get(record.configuration)
        if row is None:
            raise PlanError(
                f"{file.path}:{number}: the trial's configuration '{record.configuration}' is "
                "not in this search space; give the trials file of this search, or a new one."
            )
        rows.append(row)
    return rows
