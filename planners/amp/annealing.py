"""AMP's randomised search (Sec. 6.3): annealing over degrees, micro-batch and domino tilings."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.costs import Estimate
from shardweave.planners.amp.model import Strategy
from shardweave.planners.amp.network import ClusterArrays, Grid

TILINGS = 20
"""Attempts to tile a board; each ends where no domino fits into the first free place."""


@dataclass(frozen=True)
class Annealing:
    """Options of the annealing. steps: number of neighbours tried. seed: random seed.

    start: the initial temperature, as a share of the first strategy's seconds; it falls linearly.
    """

    steps: int = 200
    seed: int = 0
    start: float = 0.1


def board_of(links: ClusterArrays) -> Grid:
    """Arrange the devices in a 2D mesh: a column holds devices of one node, and nodes of the same
    type and NIC bandwidth are neighbours."""
    height = math.gcd(*np.bincount(links.node).tolist())
    devices = np.lexsort((links.nic[links.node], links.kind))
    return np.ascontiguousarray(devices.reshape(-1, height).T)


def domino_grid(board: Grid, strategy: Strategy, dice: random.Random) -> Grid | None:
    """Draw a tiling of the board by dominoes of tensor x data devices, upright or lying; a stage
    each, down the columns. Returns None if no attempt succeeds.

    The ranks of a domino go down its columns, the tensor axis first. A domino whose tensor groups
    would leave their node is not drawn, as profiles hold within a node alone.
    """
    tensor, data = strategy.tensor, strategy.data
    shapes = [(tensor, data), *([(data, tensor)] if data != tensor and not data % tensor else [])]
    for _ in range(TILINGS):
        stages = _tiled(board, shapes, strategy.pipeline, dice)
        if stages is not None:
            return np.stack([stage.reshape(data, tensor) for stage in stages])
    return None


def _tiled(
    board: Grid, shapes: Sequence[tuple[int, int]], count: int, dice: random.Random
) -> list[Grid] | None:
    free, tiles = np.ones(board.shape, dtype=bool), list[Grid]()
    for _ in range(count):
        column, row = divmod(int(free.T.argmax()), len(board))
        for height, width in dice.sample(shapes, len(shapes)):
            place = slice(row, row + height), slice(column, column + width)
            if free[place].shape == (height, width) and free[place].all():
                free[place] = False
                tiles.append(board[place].T.ravel())
                break
        else:
            return None
    return tiles


def anneal(
    board: Grid,
    among: Sequence[Strategy],
    best_on: Callable[[Strategy, Grid], Estimate | None],
    annealing: Annealing,
) -> dict[Strategy, tuple[Estimate, Grid]]:
    """Search by simulated annealing (AMP, Algorithm 2); not exact. Returns the fastest placement
    of each strategy that it accepted.

    A neighbour has another tensor degree or another data degree, and any micro-batch and tiling.
    best_on: the estimate of a strategy with its best cuts on a placement; None if it does not fit.
    """
    dice = random.Random(annealing.seed)
    accepted: dict[Strategy, tuple[Estimate, Grid]] = {}
    current, seconds, heat = dice.choice(among), math.inf, 0.0
    for step in range(annealing.steps):
        tried = _neighbour(current, among, dice) if accepted else dice.choice(among)
        grid = domino_grid(board, tried, dice)
        estimate = None if grid is None else best_on(tried, grid)
        if grid is None or estimate is None:
            continue
        if not accepted:
            heat = annealing.start * estimate.seconds
        left = heat * (1 - step / annealing.steps)
        rise = estimate.seconds - seconds
        if rise <= 0 or dice.random() < math.exp(-rise / left):
            current, seconds = tried, estimate.seconds
            before = accepted.get(tried)
            if before is None or seconds < before[0].seconds:
                accepted[tried] = estimate, grid
    return accepted


def _neighbour(current: Strategy, among: Sequence[Strategy], dice: random.Random) -> Strategy:
    """Draw a strategy with the data degree or the tensor degree of the current one."""
    axis, kept = dice.choice((("tensor", "data"), ("data", "tensor")))
    near = [s for s in among if getattr(s, kept) == getattr(current, kept)]
    degree = dice.choice(sorted({getattr(s, axis) for s in near}))
    return dice.choice([s for s in near if getattr(s, axis) == degree])
