"""Simulated annealing over placements (AMP, Sec. 6.3): which devices form which stage."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.network import Grid


@dataclass(frozen=True)
class Annealing:
    """strategies: how many of the best ones. steps: swaps tried for each. seed: of the swaps.

    start: the temperature, as a share of the first placement's seconds; it falls to a hundredth of
    that, by the same factor at every step.
    """

    strategies: int = 3
    steps: int = 200
    seed: int = 0
    start: float = 0.02


def anneal(grid: Grid, evaluate: Callable[[Grid], float], annealing: Annealing) -> Grid:
    """The best placement found from `grid` on; never worse than it, and not exact.

    evaluate: seconds of a placement, infinite if it does not fit. A swap exchanges two tensor
    groups, which stay whole: they are on one node, as their profile was taken. Placements seen
    before are looked up, so that the time is at most `steps` evaluations.
    """
    dice = random.Random(annealing.seed)
    groups = grid.reshape(-1, grid.shape[-1])
    if len(groups) < 2:
        return grid
    current = best = list(range(len(groups)))
    seconds = least = evaluate(grid)
    seen = {tuple(current): seconds}
    heat = annealing.start * seconds
    for _ in range(annealing.steps):
        heat *= 0.01 ** (1 / annealing.steps)
        one, other = dice.sample(range(len(groups)), 2)
        tried = current.copy()
        tried[one], tried[other] = tried[other], tried[one]
        key = tuple(tried)
        if key not in seen:
            seen[key] = evaluate(groups[tried].reshape(grid.shape))
        change = seen[key] - seconds
        if change <= 0 or dice.random() < math.exp(-change / heat):
            current, seconds = tried, seen[key]
        if seconds < least:
            best, least = current, seconds
    return np.ascontiguousarray(groups[best].reshape(grid.shape))
