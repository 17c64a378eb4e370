"""Degrees that the chain model ranks first, held to the simulator.

The chain hides a message behind the block next to it alone, and charges gathers in full that a
schedule hides; so the degrees that it likes best need not be the fastest. The best few of its order
are simulated, and then changes of single blocks of the fastest, until none is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from shardweave.planners.oases.chain import ChainCosts
from shardweave.planners.plan.plan_parts import Predicted

TOP = 4
"""Paths of the chain's order that are simulated before single blocks are changed: a start that is
good by another path than the first. Not tuned."""

Path = tuple[int, ...]


def refined(
    costs: ChainCosts,
    first: Path,
    budget_bytes: float,
    simulate: Callable[[Path], Predicted],
    most: int,
) -> dict[Path, Predicted]:
    """What a few paths take, the fastest that fits first: at most `most` are simulated.

    first: a path that fits by the chain, simulated whatever the others are. Those that change one
    block of the fastest are simulated in the order of the chain. A local optimum: exact among all
    that differ from it in one block, if `most` leaves it time.
    """
    seen: dict[Path, Predicted] = {}
    near = [first, *(p for p in best_paths(costs, TOP) if costs.memory(p) <= budget_bytes)]
    while True:
        before = min(seen, key=lambda path: _rank(seen[path]), default=None)
        for path in dict.fromkeys(near):
            if path not in seen and len(seen) < max(1, most):
                seen[path] = simulate(path)
        order = sorted(seen, key=lambda path: _rank(seen[path]))
        if order[0] == before:
            return {path: seen[path] for path in order}
        near = sorted(_changed(costs, order[0]), key=costs.time_s)


def _rank(found: Predicted) -> tuple[bool, float]:
    return not found.fits, found.time_s


def _changed(costs: ChainCosts, path: Path) -> Iterator[Path]:
    """Paths with another choice for one block."""
    for place, row in enumerate(costs.unary_s):
        for choice in range(len(row)):
            if choice != path[place]:
                yield (*path[:place], choice, *path[place + 1 :])


def best_paths(costs: ChainCosts, count: int) -> list[Path]:
    """The paths of least time, whatever their memory, the fastest first. O(k D^2 count log)."""
    ends = [[(time_s, (choice,))] for choice, time_s in enumerate(costs.unary_s[0])]
    for row, matrix in zip(costs.unary_s[1:], costs.edge_s, strict=True):
        ends = [
            sorted(
                (time_s + matrix[path[-1]][choice] + node_s, (*path, choice))
                for paths in ends
                for time_s, path in paths
            )[:count]
            for choice, node_s in enumerate(row)
        ]
    whole = sorted(one for paths in ends for one in paths if one[0] < math.inf)
    return [path for _, path in whole[:count]]
