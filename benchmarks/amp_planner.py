"""AMP's planner on the published setups: estimates against measured steps, and search times.

Every strategy of a file of runs is estimated with the cuts that the file gives, as published
(literal) and on the cluster as it is (corrected); a strategy without cuts gets its best ones.
Correlations are over the runs that succeeded. Search times are processor time, the fastest of
several, and cover all strategies of the setup; no parameter is fitted to the runs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.amp_data import (
    DATA,
    Measured,
    Setup,
    published_cpu_s,
    reached,
    read_measured,
    setup_of,
    setups,
)
from shardweave.benchmarks.amp_literal import literal_costs, literal_cuts, search_literally
from shardweave.planners.amp.costs import Costs, Estimate, corrected_costs, estimate
from shardweave.planners.amp.memory import stage_bytes
from shardweave.planners.amp.network import ClusterArrays, megatron_grid
from shardweave.planners.amp.search import best_cuts, search_strategies

ROUNDS, QUICK_ROUNDS = 5, 1
SHOWN = 10


@dataclass(frozen=True)
class Row:
    """One run of the file. fits: no stage exceeds the smallest memory of the cluster."""

    run: Measured
    literal: Estimate
    corrected: Estimate
    fits: bool

    @property
    def succeeded(self) -> bool:
        """Whether there is a measured time to compare with."""
        return self.run.measured_s is not None and math.isfinite(self.run.measured_s)


@dataclass(frozen=True)
class Quality:
    """How well estimates order the runs that succeeded.

    spearman: rank correlation. best_rank: place of the run with the smallest estimate among the
    measured times, from 1. ratio: median of estimated over measured seconds.
    """

    spearman: float
    best_rank: int
    ratio: float


def estimate_runs(setup: Setup, runs: Sequence[Measured]) -> list[Row]:
    """Both estimates of every run."""
    links = ClusterArrays.of(setup.cluster)
    capacity = min(device.memory_bytes for device in setup.cluster.devices.values())
    rows: list[Row] = []
    for run in runs:
        one = run.strategy
        if one.pipeline * one.data * one.tensor != setup.cluster.num_devices:
            raise ValueError(
                f"run with pp {one.pipeline}, dp {one.data}, tmp {one.tensor}: found "
                f"{one.pipeline * one.data * one.tensor} devices, expected the "
                f"{setup.cluster.num_devices} of setup '{setup.name}'; use runs of this setup."
            )
        exact = _estimate(setup, links, run, corrected_costs)
        used = stage_bytes(setup.model, run.strategy, exact.cuts)
        fits = all(sum(parts.values()) <= capacity for parts in used)
        rows.append(Row(run, _estimate(setup, links, run, literal_costs), exact, fits))
    return rows


def _estimate(setup: Setup, links: ClusterArrays, run: Measured, costs: Costs) -> Estimate:
    found = costs(setup.model, links, run.strategy, megatron_grid(run.strategy))
    if run.cuts:
        return estimate(setup.model, run.strategy, found, setup.cuts_of_rows(run.cuts))
    if costs is literal_costs:
        return literal_cuts(setup.model, run.strategy, found)
    # What ran is estimated as it is: memory limits nothing but the search.
    found = replace(found, problem=replace(found.problem, first=None))
    best = best_cuts(setup.model, run.strategy, found)
    assert best is not None, "without memory limits there are cuts"
    return best


def quality(estimates: Sequence[float], measured: Sequence[float]) -> Quality:
    """How well estimates order measured times; needs at least two of them."""
    from scipy.stats import rankdata  # a second, which importers of this file need not wait

    ranks, goal = rankdata(estimates), rankdata(measured)
    best = int(np.argmin(estimates))
    return Quality(
        spearman=float(np.corrcoef(ranks, goal)[0, 1]),
        best_rank=1 + sum(one < measured[best] for one in measured),
        ratio=float(np.median(np.array(estimates) / np.array(measured))),
    )


def search_s(setup: Setup, rounds: int, *, literal: bool) -> float:
    """Processor seconds of a full search, the fastest of `rounds`."""
    found: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        (search_literally if literal else search_strategies)(setup.model, setup.cluster)
        found.append(time.process_time() - start)
    return min(found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--setup", choices=setups(), default="homogeneous")
    parser.add_argument(
        "--measured",
        metavar="FILE",
        type=Path,
        default=DATA / "amp_results.csv",
        help="runs, as in data/amp_results.csv (the default)",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Estimate the runs of a file, time the searches, print both, and return them."""
    setup = setup_of(options.setup)
    rows = estimate_runs(setup, read_measured(options.measured, setup.name))
    done = [row for row in rows if row.succeeded]
    if len(done) < 2:
        raise ValueError(
            f"'{options.measured}': found {len(done)} successful runs of setup '{setup.name}', "
            "expected at least two to order; add runs with finite measured_s."
        )
    measured = [row.run.measured_s or math.inf for row in done]
    qualities = {
        "literal": quality([row.literal.seconds for row in done], measured),
        "corrected": quality([row.corrected.seconds for row in done], measured),
    }
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    seconds = {
        mode: search_s(setup, rounds, literal=mode == "literal")
        for mode in ("literal", "corrected")
    }
    published = published_cpu_s(setup.name)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_runs_table(setup, rows))
    for mode, found in qualities.items():
        console.print(
            f"{mode}: Spearman {found.spearman:.4f} over {len(done)} runs; the estimated best is "
            f"number {found.best_rank} as measured; estimates are {found.ratio:.2f} of measured;\n"
            f"  search {seconds[mode] * 1e3:.1f} ms (published {published:.0f} s)",
            highlight=False,
        )
    return {
        "setup": setup.name,
        "cluster": setup.cluster.name,
        "model": setup.model.name,
        "num_runs": len(rows),
        "num_succeeded": len(done),
        "reached_share": float(reached()),
        "modes": {
            mode: vars(found) | {"search_s": seconds[mode]} for mode, found in qualities.items()
        },
        "published_search_cpu_s": published,
        "runs": [_as_json(row) for row in rows],
    }


def _runs_table(setup: Setup, rows: Sequence[Row]) -> Table:
    table = Table(
        title=f"{setup.model.name} on {setup.cluster.name}: fastest by corrected estimate"
    )
    for name in ("pp", "dp", "tmp", "mbs", "literal s", "corrected s", "measured s", "fits"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda one: one.corrected.seconds)[:SHOWN]:
        one = row.run.strategy
        measured = row.run.measured_s
        table.add_row(
            *map(str, (one.pipeline, one.data, one.tensor, one.micro_batch)),
            f"{row.literal.seconds:.3f}",
            f"{row.corrected.seconds:.3f}",
            "not run" if measured is None else f"{measured:.3f}" if row.succeeded else "failed",
            "yes" if row.fits else "no",
        )
    return table


def _as_json(row: Row) -> dict[str, Any]:
    one, measured = row.run.strategy, row.run.measured_s
    return {
        "pp": one.pipeline,
        "dp": one.data,
        "tmp": one.tensor,
        "mbs": one.micro_batch,
        "cuts": list(row.corrected.cuts),
        "literal_s": row.literal.seconds,
        "corrected_s": row.corrected.seconds,
        "published_s": row.run.published_s,
        "measured_s": measured if row.succeeded else None,
        "failed": measured is not None and not row.succeeded,
        "fits": row.fits,
    }
