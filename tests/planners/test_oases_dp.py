"""The exact solver of Oases' chain, against trying all paths."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from shardweave.benchmarks.oases_data import BUDGET_BYTES, chain_of, model_of
from shardweave.benchmarks.oases_literal import published_costs
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.chain import linearise
from shardweave.planners.oases.dp import solve_chain
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.tests.planners.small_chains import (
    least_time,
    random_budget,
    random_chain,
    three_blocks,
)


@pytest.mark.parametrize("literal", [False, True])
def test_search_equals_trying_all_paths(literal: bool) -> None:
    for seed in range(40):
        chain = random_chain(seed)
        budget = random_budget(seed, chain)
        costs = published_costs(chain) if literal else None
        wanted = least_time(chain, budget, literal=literal)
        if wanted is None:
            with pytest.raises(PlanError, match="GiB too much"):
                solve_chain(chain, budget, costs=costs)
            continue
        found = solve_chain(chain, budget, costs=costs)
        assert found.time_s == pytest.approx(wanted, rel=1e-9), f"seed {seed}"
        assert found.memory_bytes <= budget


def test_stages_are_solved_as_by_trying_all_paths_of_the_whole_step() -> None:
    for seed in range(40):
        chain = random_chain(seed)
        count = len(chain.blocks)
        starts = tuple(sorted({0, count // 3, 2 * count // 3}))
        chain = replace(chain, starts=starts, micro_batches=1 + seed % 4)
        budget = random_budget(seed, chain) / len(starts)
        wanted = least_time(chain, budget)
        if wanted is None:
            with pytest.raises(PlanError, match="GiB too much"):
                solve_chain(chain, budget)
            continue
        found = solve_chain(chain, budget)
        assert found.time_s == pytest.approx(wanted, rel=1e-9), f"seed {seed}"
        assert found.memory_bytes <= budget


def test_without_a_budget_the_fastest_path_wins() -> None:
    for seed in range(20):
        chain = random_chain(seed)
        assert solve_chain(chain).time_s == pytest.approx(least_time(chain, math.inf))


def test_too_small_budget_names_the_smallest_shortfall_and_its_parts() -> None:
    # Degree 2 everywhere needs 3 x (4 + 3) + 1 GiB, the least of all.
    with pytest.raises(PlanError) as error:
        solve_chain(three_blocks(), 20 * GIB)
    assert str(error.value) == (
        "no degrees fit into 20.00 GiB: the least memory, with blocks by degree {2: 3}, is 22.00 "
        "GiB (parameters, gradients and optimizer 12.00, activations 9.00, workspace 1.00), 2.00 "
        "GiB too much; use more devices, larger degrees or a smaller batch."
    )


@pytest.mark.parametrize("hidden", [2048, 4096, 8192])
def test_models_of_table_6_are_planned_within_the_budget(hidden: int) -> None:
    model = model_of(hidden)
    chain = chain_of(model, "3090")
    start_s = time.process_time()
    found = solve_chain(chain, BUDGET_BYTES)
    assert time.process_time() - start_s < 1
    assert len(found.degrees) == 2 * model.layers
    assert found.memory_bytes <= BUDGET_BYTES


def test_best_degrees_of_the_published_profile_are_these() -> None:
    model = model_of(3072)
    found = solve_chain(chain_of(model, "3090"), BUDGET_BYTES)
    assert found.degrees == (2,) * 16 + (4,) * 32


def test_released_planner_loses_three_quarters_of_a_percent_on_its_own_profile() -> None:
    chain = chain_of(model_of(4096), "3090", literal=True)
    exact = linearise(chain)
    literal = solve_chain(chain, BUDGET_BYTES, costs=published_costs(chain))
    assert literal.degrees.count(2) == 2
    best = solve_chain(chain, BUDGET_BYTES)
    assert best.degrees.count(2) == 3
    assert exact.time_s(literal.path) / best.time_s - 1 == pytest.approx(0.0075, abs=5e-5)
