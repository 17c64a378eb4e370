"""What ending slow trials early saves a search: hours and trials until one is near the best.

`python benchmarks/planners.py oppa-early-stop [--seeds N] [--json FILE]`. The problem, the
simulated trials and their hours are those of `oppa_planner`. With early stops a trial of
20 steps ends after 4 whose first two samples take twice as long as a step of the fastest trial
so far; what it took until then is kept, so that nothing is thrown away but precision. `random`
makes 200 trials, `oppa` as many as it needs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.oppa_planner import (
    METHODS,
    PROBLEMS,
    TRIALS,
    Run,
    one_search,
    true_shares,
)

SLOW = {"whole trials": 0.0, "slow ones ended": 2.0}
"""By what is done, how many times the fastest a trial may take."""

SEARCHES = ("random", "oppa, extended")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many searches."""
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Means over seeds. hours: of all trials of a search."""
    return {
        "trials": [len(one.shares) for one in runs],
        "hours": statistics.fmean(one.hours[-1] for one in runs),
        "best_share": statistics.fmean(one.shares[-1] for one in runs),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Search with and without early stops, print the table; what `--json` writes."""
    problem = PROBLEMS["gpt-h100"]
    machine = problem.machine()
    shares = true_shares(problem.space(), machine)
    trials, seeds = (12, 1) if options.quick else (TRIALS, options.seeds)
    first = problem.first_seed
    found = {
        name: {
            what: summary(
                [
                    one_search(METHODS[name], seed, trials, machine, shares, slow)
                    for seed in range(first, first + seeds)
                ]
            )
            for what, slow in SLOW.items()
        }
        for name in SEARCHES
    }
    table = Table(title="Searches whose slow trials end early")
    for title in ("method", "trials are", "trials", "hours", "best"):
        table.add_column(title)
    for name, by_stop in found.items():
        for what, one in by_stop.items():
            counts = " ".join(map(str, one["trials"]))
            table.add_row(name, what, counts, f"{one['hours']:.1f}", f"{one['best_share']:.1%}")
    Console().print(table)
    return {"seeds": seeds, "searches": found}
