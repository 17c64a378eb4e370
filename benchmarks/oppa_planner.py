"""OPPA against standard Bayesian optimisation, random, trees and its cost model, on 16 GPUs.

`python benchmarks/planners.py oppa [--quick] [--trials N] [--json FILE] [--plot FILE]`. The space
is all configurations of Llama-2 7B with a batch of 256 sequences of 1024 on 4 nodes of 4 A100-40GB;
trials are simulated, with noise (`planners/oppa/step_model.py`). A search sees noisy times alone;
it is judged by the true ones: how many trials until one is within 2% of the best. `--quick`: one
seed and few trials.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardweave.planners.oppa.choosers import (
    BayesianChooser,
    Chooser,
    CostModelChooser,
    RandomChooser,
)
from shardweave.planners.oppa.search import Budget, search
from shardweave.planners.oppa.simulated import SimulatedTrial
from shardweave.planners.oppa.space import Configuration, Space
from shardweave.planners.oppa.step_model import StepModel, Transformer
from shardweave.planners.oppa.trees import TreeChooser
from shardweave.planners.oppa.trials import Record
from shardweave.planners.presets import find_cluster

MODEL = Transformer("llama-2 7b", 32, 4096, 32, 11008, 32000, 1024, 256, mlp_matrices=3)
CLUSTER = "perlmutter:nodes=4"
NEAR = 0.98
TRIALS = 60
SETUP_S = 60.0
"""Starting a trial on a cluster; with that, its steps are its cost."""

STEPS_TRIED = 20

METHODS: Mapping[str, Chooser] = {
    "oppa": BayesianChooser("extended"),
    "oppa, paper's formulas": BayesianChooser("corrected"),
    "standard BO": BayesianChooser(None),
    "random": RandomChooser(),
    "boosted trees": TreeChooser(),
    "cost model alone": CostModelChooser("extended"),
}


class _Reached(Exception):
    """A search came near the best: what it does after that is not asked for."""


@dataclass(frozen=True)
class Run:
    """One search. shares: of the best throughput, of the best trial so far. hours: so far."""

    seed: int
    shares: tuple[float, ...]
    hours: tuple[float, ...]
    num_failed: int
    seconds: float

    @property
    def trials(self) -> int | None:
        """Until one was near the best; None if none was."""
        return len(self.shares) if self.shares and self.shares[-1] >= NEAR else None


def true_shares(space: Sequence[Configuration], machine: StepModel) -> dict[Configuration, float]:
    """Throughput of each configuration over the best; 0 of what does not fit."""
    limit = SimulatedTrial(machine).memory_bytes
    costs = {one: machine.cost(one) for one in space}
    rates = {one: 1 / c.seconds if c.peak_bytes <= limit else 0.0 for one, c in costs.items()}
    best = max(rates.values())
    return {one: rate / best for one, rate in rates.items()}


def one_search(
    chooser: Chooser,
    seed: int,
    trials: int,
    machine: StepModel,
    shares: Mapping[Configuration, float],
) -> Run:
    """Search until a trial is near the best, or the trials are spent."""
    torch.set_num_threads(1)  # the matrices are small
    trial = SimulatedTrial(machine, seed)
    found: list[Record] = []

    def note(records: Sequence[Record]) -> None:
        found[:] = records
        if shares[records[-1].configuration] >= NEAR:
            raise _Reached

    start_s = time.monotonic()
    try:
        limit = trial.memory_bytes
        search(
            list(shares),
            trial,
            chooser,
            Budget(trials),
            memory_bytes=limit,
            seed=seed,
            progress=note,
        )
    except _Reached:
        pass
    best = accumulate((shares[one.configuration] for one in found), max)
    hours = accumulate(
        (SETUP_S + sum(one.outcome.times_s[:1]) * STEPS_TRIED) / 3600 for one in found
    )
    failed = sum(one.outcome.status != "ok" for one in found)
    return Run(seed, tuple(best), tuple(hours), failed, time.monotonic() - start_s)


def median_trials(runs: Sequence[Run]) -> float | None:
    """Of all seeds; None if most of them never came near."""
    middle = statistics.median(one.trials or float("inf") for one in runs)
    return middle if middle < float("inf") else None


def table_of(runs: Mapping[str, Sequence[Run]], trials: int) -> Table:
    """A row for each method."""
    table = Table(title=f"Trials until one is within {1 - NEAR:.0%} of the best (at most {trials})")
    for title in ("method", "median", "by seed", "best found, median", "failed", "s a search"):
        table.add_column(title)
    for name, of_seeds in runs.items():
        median = median_trials(of_seeds)
        table.add_row(
            name,
            f"{median:g}" if median else f"> {trials}",
            " ".join(str(one.trials or "-") for one in of_seeds),
            f"{statistics.median(one.shares[-1] for one in of_seeds):.1%}",
            f"{statistics.mean(one.num_failed for one in of_seeds):.0f}",
            f"{statistics.mean(one.seconds for one in of_seeds):.0f}",
        )
    return table


def plot(runs: Mapping[str, Sequence[Run]], trials: int, path: str) -> None:
    """The median best so far, against trials and against hours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, of_seeds in runs.items():
        rows = [[*one.shares] + [one.shares[-1]] * (trials - len(one.shares)) for one in of_seeds]
        best = [statistics.median(column) for column in zip(*rows, strict=True)]
        left.step(range(1, trials + 1), best, where="post", label=name)
        end = max(one.hours[-1] for one in of_seeds)
        points = [end * k / 200 for k in range(201)]
        lines = [[_at(one, hours) for hours in points] for one in of_seeds]
        right.step(points, [statistics.median(c) for c in zip(*lines, strict=True)], where="post")
    for axes, label in ((left, "trials"), (right, "hours of trials")):
        axes.axhline(NEAR, color="grey", linestyle=":")
        axes.set_xlabel(label)
        axes.set_ylim(0.5, 1.01)
    left.set_ylabel("best so far / best there is")
    left.legend()
    figure.savefig(path, dpi=110)


def _at(run: Run, hours: float) -> float:
    """The best share by then."""
    return max(
        (s for s, end in zip(run.shares, run.hours, strict=True) if end <= hours), default=0.0
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size of the run, and the picture."""
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--trials", type=int, default=TRIALS, help=f"at most (default: {TRIALS})")
    parser.add_argument("--jobs", type=int, default=1, help="searches at once (default: 1)")
    parser.add_argument("--plot", metavar="FILE", help="draw the best so far there")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Search with every method and seed, print the table; what `--json` writes."""
    trials, seeds = (12, 1) if options.quick else (options.trials, options.seeds)
    machine = StepModel(MODEL, find_cluster(CLUSTER))
    space = Space(16, MODEL.heads, MODEL.layers, MODEL.batch)
    shares = true_shares(space.enumerate(), machine)
    near = sum(share >= NEAR for share in shares.values())
    fitting = sum(share > 0 for share in shares.values())
    console = Console(stderr=True)
    runs: dict[str, list[Run]] = {name: [] for name in METHODS}
    jobs = [(name, seed) for seed in range(seeds) for name in METHODS]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        made = [
            pool.submit(one_search, METHODS[name], seed, trials, machine, shares)
            for name, seed in jobs
        ]
        pairs = zip(jobs, made, strict=True)
        for (name, _), one in track(pairs, "searching", len(jobs), console=console):
            runs[name].append(one.result())
    Console().print(table_of(runs, trials))
    print(f"{len(shares)} configurations, {fitting} fit, {near} are within {1 - NEAR:.0%}")
    if options.plot:
        plot(runs, trials, options.plot)
        print(f"wrote {options.plot}")
    return {
        "model": MODEL.name,
        "cluster": CLUSTER,
        "num_configurations": len(shares),
        "num_fitting": fitting,
        "num_near": near,
        "trials": trials,
        "median_trials": {name: median_trials(found) for name, found in runs.items()},
        "runs": {
            name: [
                {
                    "seed": one.seed,
                    "trials": one.trials,
                    "best_share": [round(share, 5) for share in one.shares],
                    "hours": [round(hours, 4) for hours in one.hours],
                }
                for one in found
            ]
            for name, found in runs.items()
        },
    }
