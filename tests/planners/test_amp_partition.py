"""AMP's stage partition against all cuts there are."""

import math
import time
from itertools import combinations

import numpy as np
import pytest

from shardweave.planners.amp.partition import Problem, exact_cuts


def brute_force(problem: Problem) -> float:
    """The least objective over all cuts; infinite if none keep to `first`."""
    layers, stages = problem.times.shape[1], len(problem.kinds)
    best = math.inf
    for inner in combinations(range(1, layers), stages - 1):
        cuts = (0, *inner, layers)
        if problem.first is not None and any(
            cuts[s] < problem.first[s, cuts[s + 1]] for s in range(stages)
        ):
            continue
        times = [
            problem.times[kind, cuts[s] : cuts[s + 1]].sum() for s, kind in enumerate(problem.kinds)
        ]
        crossing = sum(problem.boundary[s, cuts[s + 1]] for s in range(stages - 1))
        best = min(best, problem.repeats * max(times) + sum(times) + crossing)
    return best


def random_problem(seed: int) -> Problem:
    """Up to 9 layers on up to 5 stages of up to 3 kinds, half of them with memory limits."""
    dice = np.random.default_rng(seed)
    layers = int(dice.integers(1, 10))
    stages = int(dice.integers(1, min(layers, 5) + 1))
    kinds = int(dice.integers(1, 4))
    times = dice.random((kinds, layers))
    if dice.random() < 0.5:
        times = dice.integers(0, 5, (kinds, layers)).astype(float)  # many equal sums, and zeros
    first = None
    if dice.random() < 0.5:
        size = np.concatenate([[0], np.cumsum(dice.integers(0, 4, layers))])
        first = np.stack([np.searchsorted(size, size - c) for c in dice.integers(2, 12, stages)])
    boundary = dice.random((stages - 1, layers + 1)) * dice.choice([0, 0.1, 3])
    chosen = tuple(dice.integers(0, kinds, stages).tolist())
    return Problem(times, chosen, boundary, float(dice.choice([0, 1, 3, 15])), first)


@pytest.mark.parametrize("block", range(20))
def test_partition_equals_the_best_of_all_cuts_on_100_random_problems(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        problem = random_problem(seed)
        found, best = exact_cuts(problem), brute_force(problem)
        assert (found is None) == math.isinf(best), seed
        if found is not None:
            assert found.seconds == pytest.approx(best, rel=1e-9, abs=1e-9), seed


def test_costly_boundary_moves_a_cut_that_equal_layers_would_not() -> None:
    boundary = np.zeros((1, 5))
    even = Problem(np.ones((1, 4)), (0, 0), boundary, 3.0)
    boundary = boundary.copy()
    boundary[0, 2] = 10.0
    costly = Problem(np.ones((1, 4)), (0, 0), boundary, 3.0)
    assert exact_cuts(even).cuts == (0, 2, 4)  # type: ignore[union-attr]
    assert max(np.diff(exact_cuts(costly).cuts)) == 3  # type: ignore[union-attr]


def test_slow_stage_gets_fewer_layers() -> None:
    times = np.stack([np.ones(6), np.full(6, 2.0)])
    found = exact_cuts(Problem(times, (0, 1), np.zeros((1, 7)), 100.0))
    assert found is not None
    assert found.cuts == (0, 4, 6)


def test_fewer_layers_than_stages_have_no_partition() -> None:
    assert exact_cuts(Problem(np.ones((1, 2)), (0,) * 3, np.zeros((2, 3)), 1.0)) is None


def test_thousand_layers_on_64_stages_take_less_than_a_second() -> None:
    dice = np.random.default_rng(0)
    problem = Problem(dice.random((1, 1000)) + 0.5, (0,) * 64, dice.random((63, 1001)) * 0.3, 7.0)
    start = time.process_time()
    found = exact_cuts(problem)
    assert time.process_time() - start < 1.0
    assert found is not None
    assert len(found.cuts) == 65
