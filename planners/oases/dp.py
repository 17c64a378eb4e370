"""Exact solver of Oases' chain under a memory budget, by labels with a Lagrangian bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import add, itemgetter
from typing import NamedTuple

from shardweave.planners.oases.chain import Chain, ChainCosts, linearise, no_fit

_TOLERANCE = 1e-12
"""Relative time by which a path must be faster to count as better, above rounding."""

_BY_MEMORY_THEN_TIME = itemgetter(0, 1)


Path = tuple[int, ...]
"""The index of each block's option."""


@dataclass(frozen=True)
class Solution:
    """The best path: its degrees, seconds and bytes."""

    path: Path
    degrees: tuple[int, ...]
    time_s: float
    memory_bytes: int


class _Label(NamedTuple):
    """A partial path: its bytes and seconds, the option of its last block, its predecessor."""

    memory_bytes: int
    time_s: float
    choice: int
    before: _Label | None


def solve_chain(
    chain: Chain,
    budget_bytes: float = math.inf,
    *,
    costs: ChainCosts | None = None,
) -> Solution:
    """Find the degrees of least time whose memory is at most `budget_bytes`.

    Objective: `costs`, by default (3) + (4) in seconds, subject to (6). Exact. Raises PlanError,
    with the smallest shortfall in GiB, if nothing fits. Stages are solved one by one: a step by
    1F1B takes longer the longer any stage takes.

    A label is the (time, memory) of a way to reach a choice of a block. A label is dropped if
    another beats it in both, or if by a Lagrangian bound it cannot end below the best path known to
    fit. For k blocks with D degrees and l labels for a choice it takes O(k D^2 l log l): a few
    hundred labels for the equal layers of a transformer; exponentially many in the worst case,
    where all memories differ.
    """
    costs = costs or linearise(chain)
    if len(chain.starts) > 1:
        parts = [solve_chain(stage, budget_bytes).path for stage in chain.stages]
        path = tuple(choice for part in parts for choice in part)
        return Solution(path, chain.degrees(path), costs.time_s(path), costs.memory(path))
    lightest = tuple(row.index(min(row)) for row in costs.memory_bytes)
    if costs.memory(lightest) > budget_bytes:
        raise no_fit(chain, lightest, budget_bytes)
    path = _fastest_within(costs, lightest, budget_bytes)
    return Solution(path, chain.degrees(path), costs.time_s(path), costs.memory(path))


def _fastest_within(costs: ChainCosts, lightest: Path, budget_bytes: float) -> Path:
    fastest, _ = _least(costs, 0.0)
    if costs.memory(fastest) <= budget_bytes:
        return fastest
    weight, best = _best_multiplier(costs, fastest, lightest, budget_bytes)
    limit_s = costs.time_s(best) * (1 - _TOLERANCE)
    end = _search(costs, weight, limit_s, budget_bytes)
    return best if end is None else _path_of(end)


def _least(costs: ChainCosts, weight: float) -> tuple[Path, list[list[float]]]:
    """Minimise time + weight * memory. Returns the path and, by block and choice, the least value
    over all later blocks. weight: seconds per byte."""
    nodes = [
        [time_s + weight * size for time_s, size in zip(*rows, strict=True)]
        for rows in zip(costs.unary_s, costs.memory_bytes, strict=True)
    ]
    togo = [[0.0] * len(nodes[-1])]
    for row, edges in zip(reversed(nodes[1:]), reversed(costs.edge_s), strict=True):
        after = list(map(add, row, togo[-1]))
        togo.append([min(map(add, step, after)) for step in edges])
    togo.reverse()
    path: list[int] = []
    for i, (row, rest) in enumerate(zip(nodes, togo, strict=True)):
        totals = list(map(add, row, rest))
        totals = list(map(add, totals, costs.edge_s[i - 1][path[-1]])) if i else totals
        path.append(totals.index(min(totals)))
    return tuple(path), togo


def _best_multiplier(
    costs: ChainCosts, large: Path, small: Path, budget_bytes: float
) -> tuple[float, Path]:
    """Return the weight of the largest Lagrangian bound, and the best fitting path found meanwhile.

    Walks the lower convex hull of (memory, time): the line through a path that is too large and one
    that fits gives the next weight, whose path replaces one of them, unless it lies on the line.
    """
    best = small
    while True:
        saved_s = costs.time_s(small) - costs.time_s(large)
        weight = max(0.0, saved_s) / (costs.memory(large) - costs.memory(small))
        path, _ = _least(costs, weight)
        fits = costs.memory(path) <= budget_bytes
        if fits:
            best = min(best, path, key=costs.time_s)
        below_s = costs.time_s(large) - costs.time_s(path)
        below_s += weight * (costs.memory(large) - costs.memory(path))
        if below_s <= _TOLERANCE * abs(costs.time_s(large)):
            return weight, best
        large, small = (large, path) if fits else (path, small)


def _search(costs: ChainCosts, weight: float, limit_s: float, budget_bytes: float) -> _Label | None:
    """Return the last label of the fastest path below `limit_s` within the budget, or None. weight:
    seconds per byte in the Lagrangian bound."""
    _, togo = _least(costs, weight)
    least_bytes = [*accumulate(map(min, reversed(costs.memory_bytes)), initial=0)][-2::-1]
    rows = [[_Label(0, 0.0, 0, None)]]
    for i, (times, sizes) in enumerate(zip(costs.unary_s, costs.memory_bytes, strict=True)):
        edges = costs.edge_s[i - 1] if i else ((0.0,) * len(times),)
        room = budget_bytes - least_bytes[i]
        following: list[list[_Label]] = []
        for b, (time_s, size) in enumerate(zip(times, sizes, strict=True)):
            room_s = limit_s + weight * budget_bytes - togo[i][b]
            paths = [
                (total, total_s, label)
                for labels, step in zip(rows, edges, strict=True)
                for label in labels
                if (total := label.memory_bytes + size) <= room
                and (total_s := label.time_s + step[b] + time_s) + weight * total < room_s
            ]
            following.append(_undominated(paths, b))
        rows = following
    # The relaxed time of a path that leaves memory unused is below its time.
    ends = [label for labels in rows for label in labels if label.time_s < limit_s]
    return min(ends, key=lambda end: end.time_s, default=None)


def _path_of(end: _Label) -> Path:
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
