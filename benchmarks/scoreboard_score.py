"""How good predictions of steps are: errors, order within groups, regret; and a formula to beat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import spearmanr

from shardweave.benchmarks.runs.predict import PredictedRun, micro_batch_of
from shardweave.benchmarks.runs.rows import MeasuredRun

LEAST_GROUP = 5
"""Runs of which a group needs so many for its order to say something."""

Pair = tuple[MeasuredRun, PredictedRun]


@dataclass(frozen=True)
class Score:
    """Of the runs of one source. Errors are shares, of the measured value. runs: with a measured
    step. error: mean absolute, of the step; scaled_error: after one free factor, `scale`. spearman:
    median within groups. regret: measured step of what is predicted to be the fastest of a group
    over the fastest measured, mean and worst; regret_of_3: of the best of the three predicted
    fastest. memory_error: mean absolute. precision, recall: of "does not fit", among `known` runs,
    of which it is known whether they fitted; `ran_out` did not, `said_out` are said not to.
    """

    runs: int
    error: float | None
    scale: float | None
    scaled_error: float | None
    groups: int
    spearman: float | None
    regret: float | None
    worst_regret: float | None
    worst_regret_of_3: float | None
    memory_error: float | None
    precision: float | None
    recall: float | None
    known: int
    ran_out: int
    said_out: int

    def record(self) -> dict[str, Any]:
        return asdict(self)


def score_of(pairs: Sequence[Pair]) -> Score:
    """The score of runs that were measured or ran out of memory."""
    timed = [(run, found.step_s) for run, found in pairs if run.step_s]
    ratios = np.array([step / run.step_s for run, step in timed])
    scale = float(1 / np.median(ratios)) if len(ratios) else None
    groups = groups_of(timed)
    orders = [_order(rows) for rows in groups]
    memory = [
        abs(found.memory_bytes / run.memory_bytes - 1) for run, found in pairs if run.memory_bytes
    ]
    known = [(run, found) for run, found in pairs if run.status in ("ok", "oom")]
    wrong = [run.status == "oom" for run, _ in known]
    said = [not found.fits for _, found in known]
    both = sum(a and b for a, b in zip(wrong, said, strict=True))
    regrets = [one[1] for one in orders]
    return Score(
        runs=len(timed),
        error=float(np.abs(ratios - 1).mean()) if len(ratios) else None,
        scale=scale,
        scaled_error=None if scale is None else float(np.abs(scale * ratios - 1).mean()),
        groups=len(groups),
        spearman=median(one[0] for one in orders) if orders else None,
        regret=float(np.mean(regrets)) if orders else None,
        worst_regret=max(regrets) if orders else None,
        worst_regret_of_3=max(one[2] for one in orders) if orders else None,
        memory_error=float(np.mean(memory)) if memory else None,
        precision=both / sum(said) if sum(said) else None,
        recall=both / sum(wrong) if sum(wrong) else None,
        known=len(known),
        ran_out=sum(wrong),
        said_out=sum(said),
    )


Timed = tuple[MeasuredRun, float]


def groups_of(timed: Sequence[Timed]) -> list[list[Timed]]:
    """Runs among which a planner would choose, where there are enough."""
    found: defaultdict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for run, step in timed:
        found[run.group].append((run, step))
    return [rows for rows in found.values() if len(rows) >= LEAST_GROUP]


def _order(rows: Sequence[Timed]) -> tuple[float, float, float]:
    """Spearman's coefficient, the regret of the predicted best, and of the best of three.

    Steps that are all the same have no order, and a coefficient of 0.
    """
    measured, predicted = [run.step_s for run, _ in rows], [step for _, step in rows]
    is_flat = len(set(measured)) == 1 or len(set(predicted)) == 1
    found = 0.0 if is_flat else float(spearmanr(measured, predicted).statistic)
    order = [run.step_s for run, _ in sorted(rows, key=lambda row: row[1])]
    return found, order[0] / min(measured), min(order[:3]) / min(measured)


def formula(pairs: Sequence[Pair]) -> tuple[list[Timed], list[Timed]]:
    """A formula of four constants (arithmetic, tensor and data traffic, ops) on the same runs.

    It is fitted, to relative errors, on every second group; returned are the other runs as the
    formula and as the simulator predict them.
    """
    runs = [(run, found) for run, found in pairs if run.step_s]
    names = sorted({run.group for run, _ in runs}, key=repr)
    fitted = set(names[::2])
    rows = np.array([_features(run) for run, _ in runs])
    steps = np.array([run.step_s for run, _ in runs])
    is_fitted = np.array([run.group in fitted for run, _ in runs])
    scaled = rows / steps[:, None]
    weights, _ = nnls(scaled[is_fitted], np.ones(int(is_fitted.sum())))
    guesses = rows @ weights
    rest = [index for index in range(len(runs)) if not is_fitted[index]]
    return (
        [(runs[i][0], float(guesses[i])) for i in rest],
        [(runs[i][0], runs[i][1].step_s) for i in rest],
    )


def _features(run: MeasuredRun) -> list[float]:
    """What the slowest device does in a step: FLOPs, bytes over tensor and data, and ops."""
    micro = micro_batch_of(run)
    count = run.batch // (run.data * micro)
    slots = count + run.pipeline - 1
    tokens = micro * run.seq
    layers = run.layers / run.pipeline
    weights = 4 * run.hidden**2 + 2 * run.hidden * run.ffn
    passes = 4 if run.recompute.startswith("full") else 3
    flops = passes * layers * tokens * (2 * weights + 4 * run.seq * run.hidden) / run.tensor
    head = 6 * tokens * run.hidden * run.vocab / run.tensor
    sent = layers * tokens * run.hidden * 4 * passes * (run.tensor - 1) / run.tensor
    grads = layers * weights / run.tensor * 4 * (run.data - 1) / run.data
    return [slots * flops + count * head, slots * sent, grads, slots * layers * passes]
