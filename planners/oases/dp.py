"""The exact solver of Oases' chain under a memory budget: labels, dominance, a Lagrangian bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from shardweave.planners.oases.chain import (
    Chain,
    ChainCosts,
    Matrix,
    linearise,
    no_fit,
)

_TOLERANCE = 1e-12
"""Relative time that a path must save to count as better, to exceed rounding."""


@dataclass(frozen=True)
class Solution:
    """The best path: its degrees, seconds and bytes. num_labels: labels kept in the search."""

    path: tuple[int, ...]
    degrees: tuple[int, ...]
    time_s: float
    memory_bytes: int
    num_labels: int = 0


class _Label(NamedTuple):
    """A partial path: its bytes and seconds, the option of its last block, its predecessor."""

    memory_bytes: int
    time_s: float
    choice: int
    before: _Label | None


_BY_MEMORY_THEN_TIME = itemgetter(0, 1)

_FIRST_SHARE = 1 / 32
"""The part of the gap between bound and best known path that is searched first."""


@dataclass(frozen=True)
class _Relaxed:
    """The Lagrangian min(time + weight * memory), by block and choice.

    weight: seconds a byte. togo_s[i][a]: its least value over all blocks after i, if block i has
    choice a. path: the one that reaches the least of all.
    """

    weight: float
    togo_s: list[list[float]]
    path: tuple[int, ...]


def solve_chain(
    chain: Chain,
    budget_bytes: float = math.inf,
    *,
    costs: ChainCosts | None = None,
) -> Solution:
    """Find the degrees of least time whose memory is at most `budget_bytes`.

    Objective: `costs`, by default (3) + (4) in seconds, subject to (6). Exact. Raises PlanError,
    with the smallest shortfall in GiB, if nothing fits.

    A label is the (time, memory) of a way to reach a choice of a block. A label is dropped if
    another beats it in both, or if by the Lagrangian bound it cannot end below the best path known
    to fit. For k blocks with D degrees a Lagrangian takes O(k D^2), and about ten are needed; the
    labels take O(k D^2 l log l), with l labels for a choice: exponential in the worst case, where
    all memories differ; a few hundred for the equal layers of a transformer.
    """
    costs = costs or linearise(chain)
    path, num_labels = _solved(costs, budget_bytes)
    if costs.memory(path) > budget_bytes:
        raise no_fit(chain, path, budget_bytes)
    return Solution(path, chain.degrees(path), costs.time_s(path), costs.memory(path), num_labels)


def _solved(costs: ChainCosts, budget_bytes: float) -> tuple[tuple[int, ...], int]:
    """Return the fastest path within the budget, else the leanest path; and the labels kept."""
    fastest = _relax(costs, 0.0)
    if costs.memory(fastest.path) <= budget_bytes:
        return fastest.path, 0
    lightest = _relax(_only_memory(costs), 0.0)
    if costs.memory(lightest.path) > budget_bytes:
        return lightest.path, 0
    relaxed, best = _best_multiplier(costs, fastest, lightest.path, budget_bytes)
    return _close_gap(costs, relaxed, lightest.togo_s, best, budget_bytes)


def _only_memory(costs: ChainCosts) -> ChainCosts:
    """The costs of finding the path of least memory."""
    unary = tuple(tuple(map(float, row)) for row in costs.memory_bytes)
    edges = tuple(tuple((0.0,) * len(row) for row in matrix) for matrix in costs.edge_s)
    return ChainCosts(unary, edges, costs.memory_bytes)


def _relax(costs: ChainCosts, weight: float) -> _Relaxed:
    """Minimise time + weight * memory, from the last block to the first."""
    unary = [
        [time_s + weight * size for time_s, size in zip(*rows, strict=True)]
        for rows in zip(costs.unary_s, costs.memory_bytes, strict=True)
    ]
    togo = [[0.0] * len(unary[-1])]
    steps: list[list[int]] = []
    for row, matrix in zip(reversed(unary[1:]), reversed(costs.edge_s), strict=True):
        after = [node + rest for node, rest in zip(row, togo[-1], strict=True)]
        least: list[float] = []
        step: list[int] = []
        for edges in matrix:
            totals = [edge + rest for edge, rest in zip(edges, after, strict=True)]
            total = min(totals)
            least.append(total)
            step.append(totals.index(total))
        togo.append(least)
        steps.append(step)
    togo.reverse()
    totals = [node + rest for node, rest in zip(unary[0], togo[0], strict=True)]
    path = [totals.index(min(totals))]
    for step in reversed(steps):
        path.append(step[path[-1]])
    return _Relaxed(weight, togo, tuple(path))


def _best_multiplier(
    costs: ChainCosts, fastest: _Relaxed, lightest: tuple[int, ...], budget_bytes: float
) -> tuple[_Relaxed, tuple[int, ...]]:
    """Return the Lagrangian with the largest bound, and the best fitting path found meanwhile.

    Walks the lower convex hull of (memory, time): the line through a path that is too large and
    one that fits gives the next multiplier, whose path replaces one of them, until it lies on
    the line.
    """
    large, small, relaxed = fastest.path, lightest, fastest
    best = small
    while True:
        time_large, time_small = costs.time_s(large), costs.time_s(small)
        size_large, size_small = costs.memory(large), costs.memory(small)
        weight = max(0.0, time_small - time_large) / (size_large - size_small)
        relaxed = _relax(costs, weight)
        path = relaxed.path
        value = costs.time_s(path) + weight * costs.memory(path)
        on_line = value >= time_large + weight * size_large - _TOLERANCE * abs(time_large)
        fits = costs.memory(path) <= budget_bytes
        if fits and costs.time_s(path) < costs.time_s(best):
            best = path
        if on_line:
            return relaxed, best
        large, small = (large, path) if fits else (path, small)


def _close_gap(
    costs: ChainCosts,
    relaxed: _Relaxed,
    least_memory: list[list[float]],
    best: tuple[int, ...],
    budget_bytes: float,
) -> tuple[tuple[int, ...], int]:
    """Return the best path, and the number of labels kept. best: a path that fits. The Lagrangian
    bounds it from below. Few labels can end in the lowest part of the gap, where the best path
    mostly is, so that part is searched first, and then twice as much."""
    upper_s = costs.time_s(best) * (1 - _TOLERANCE)
    excess = costs.memory(relaxed.path) - budget_bytes
    lower_s = costs.time_s(relaxed.path) + relaxed.weight * excess
    num_labels, share = 0, _FIRST_SHARE
    while lower_s < upper_s:
        limit_s = lower_s + min(1.0, share) * (upper_s - lower_s)
        label, kept = _search(costs, relaxed, least_memory, limit_s, budget_bytes)
        num_labels += kept
        if label is not None:
            return _path_of(label), num_labels
        if share >= 1:
            break
        share *= 2
    return best, num_labels


def _search(
    costs: ChainCosts,
    relaxed: _Relaxed,
    least_memory: list[list[float]],
    limit_s: float,
    budget_bytes: float,
) -> tuple[_Label | None, int]:
    """Return the best path that takes less than `limit_s`, and the number of labels kept."""
    weight = relaxed.weight
    relaxed_limit_s = limit_s + weight * budget_bytes
    rows = [[_Label(0, 0.0, 0, None)]]
    num_labels = 0
    for i, (times, sizes) in enumerate(zip(costs.unary_s, costs.memory_bytes, strict=True)):
        edges: Matrix = costs.edge_s[i - 1] if i else ((0.0,) * len(times),)
        following: list[list[_Label]] = []
        for b, (time_s, size) in enumerate(zip(times, sizes, strict=True)):
            room = budget_bytes - least_memory[i][b]
            room_s = relaxed_limit_s - relaxed.togo_s[i][b]
            paths = [
                (total, total_s, label)
                for labels, step in zip(rows, edges, strict=True)
                for label in labels
                if (total := label[0] + size) <= room
                and (total_s := label[1] + step[b] + time_s) + weight * total < room_s
            ]
            following.append(_undominated(paths, b))
        rows = following
        num_labels += sum(map(len, rows))
    # The relaxed time of a path that leaves memory unused is below its time.
    ends = [label for labels in rows for label in labels if label.time_s < limit_s]
    return min(ends, key=lambda end: end.time_s, default=None), num_labels


def _path_of(end: _Label) -> tuple[int, ...]:
    path: list[int] = []
    label: _Label = end
    while label.before is not None:
        path.append(label.choice)
        label = label.before
    return tuple(reversed(path))


def _undominated(labels: list[tuple[int, float, _Label]], choice: int) -> list[_Label]:
    labels.sort(key=_BY_MEMORY_THEN_TIME)
    kept: list[_Label] = []
    least_s = math.inf
    for size, time_s, before in labels:
        if time_s < least_s:
            least_s = time_s
            kept.append(_Label(size, time_s, choice, before))
    return kept
