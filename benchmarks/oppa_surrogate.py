"""OPPA's surrogates after a search: predicted beside true values, and the settings that matter.

`python benchmarks/planners.py oppa-surrogate [--json FILE] [--quick]`. Figures 4 and 7 to 10 and
Table 3 of the paper, in its three settings (`oppa_planner.PAPER`): after 30 simulated trials, the
processes of throughput and memory, with the prior and with a constant mean, predict all
configurations. The paper draws them without numbers; here they are rank correlations with the true
values, the place of the best configuration in the order of predictions, and lengthscales (the
shorter, the more a setting matters beyond the prior).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from shardweave.benchmarks.oppa_planner import METHODS, PAPER, PAPER_TRIALS, PROBLEMS
from shardweave.benchmarks.oppa_trials import SimulatedTrial
from shardweave.planners.oppa.choosers import BayesianChooser, History
from shardweave.planners.oppa.gp import fit
from shardweave.planners.oppa.planner import run_trials
from shardweave.planners.trials.space import SpaceTable
from shardweave.planners.trials.trials import Record

CHOOSERS = ("oppa, extended", "standard BO")


def surrogate(problem: str, method: str, trials: int) -> dict[str, Any]:
    """Search one setting, then compare predictions for its whole space with the truth."""
    torch.set_num_threads(1)  # the matrices are small
    setting, chooser = PROBLEMS[problem], METHODS[method]
    assert isinstance(chooser, BayesianChooser)
    machine, space = setting.machine(), setting.space()
    simulated = SimulatedTrial(machine, setting.first_seed)
    records: list[Record] = []

    def note(so_far: Sequence[Record]) -> None:
        records[:] = so_far

    limit = simulated.memory_bytes
    run_trials(
        space, simulated.run, chooser, trials,
        memory_bytes=limit, seed=setting.first_seed, progress=note,
    )  # fmt: skip
    table, row_of = SpaceTable.of(space), {one: row for row, one in enumerate(space)}
    rows = [row_of[record.configuration] for record in records]
    history = History(table, rows, records, limit)
    seen, used = history.throughputs(), history.memories()
    assert seen is not None, "some trials ran"
    assert used is not None, "some trials ran"
    belief = fit(seen, chooser.throughput)
    rates, memory = belief.at(table)[0], fit(used, chooser.memory).at(table)[0]
    costs = [machine.cost(one) for one in space]
    true_s = np.array([cost.seconds for cost in costs])
    true_bytes = np.array([cost.peak_bytes for cost in costs])
    fitting = np.flatnonzero(true_bytes <= limit)
    fastest = fitting[np.argsort(true_s[fitting])]
    order = fitting[np.argsort(-rates[fitting])]
    scales = belief.model.covar_module.base_kernel.lengthscale.flatten().tolist()
    return {
        "setting": problem,
        "method": method,
        "throughput": _rank_correlation(rates[fitting], 1 / true_s[fitting]),
        "fastest_tenth": _rank_correlation(
            *(values[fastest[: len(fastest) // 10]] for values in (rates, 1 / true_s))
        ),
        "memory": _rank_correlation(memory[fitting], true_bytes[fitting]),
        "place_of_best": int(np.flatnonzero(order == fastest[0])[0]) + 1,
        "configurations": len(fitting),
        "lengthscales": dict(zip(table.names, scales, strict=True)),
    }


def _rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(spearmanr(first, second).statistic)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the arguments of every subcommand suffice."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compare both methods in each setting, print the table; what `--json` writes."""
    trials, settings = (12, PAPER[:1]) if options.quick else (PAPER_TRIALS, PAPER)
    rows = [surrogate(name, method, trials) for name in settings for method in CHOOSERS]
    table = Table(title=f"Rank correlations of predicted and true values after {trials} trials")
    for title in ("setting", "method", "throughput", "fastest tenth", "memory", "place of the best",
                  "matter most"):  # fmt: skip
        table.add_column(title)
    for row in rows:
        shares = [f"{row[name]:.2f}" for name in ("throughput", "fastest_tenth", "memory")]
        place = f"{row['place_of_best']} of {row['configurations']}"
        shortest = sorted(row["lengthscales"], key=row["lengthscales"].__getitem__)[:3]
        table.add_row(row["setting"], row["method"], *shares, place, ", ".join(shortest))
    Console().print(table)
    return {"trials": trials, "rows": rows}
