"""The exact solver of Oases' chain, against trying all paths."""

from __future__ import annotations

import math

import pytest

from shardweave.benchmarks.oases_data import BUDGET_BYTES, chain_of, model_of
from shardweave.benchmarks.oases_literal import published_costs
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.chain import Chain, ChainBlock, linearise
from shardweave.planners.oases.dp import solve_chain
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.tests.planners.small_chains import (
    least_time,
    random_budget,
    random_chain,
    switches,
    three_blocks,
)


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("max_switches", [None, 0, 1, 2])
def test_search_equals_trying_all_paths(literal: bool, max_switches: int | None) -> None:
    for seed in range(40):
        chain = random_chain(seed)
        budget = random_budget(seed, chain)
        costs = published_costs(chain) if literal else None
        wanted = least_time(chain, budget, literal=literal, max_switches=max_switches)
        if wanted is None:
            with pytest.raises(PlanError, match="GiB too much"):
                solve_chain(chain, budget, costs=costs, max_switches=max_switches)
            continue
        found = solve_chain(chain, budget, costs=costs, max_switches=max_switches)
        assert found.time_s == pytest.approx(wanted, rel=1e-9), f"seed {seed}"
        assert found.memory_bytes <= budget
        assert max_switches is None or switches(found.degrees) <= max_switches


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


def test_budget_that_is_no_size_is_refused() -> None:
    with pytest.raises(PlanError, match="budget is 0 bytes"):
        solve_chain(three_blocks(), 0)


def test_negative_number_of_switches_is_refused() -> None:
    with pytest.raises(ValueError, match="max_switches is -1"):
        solve_chain(three_blocks(), max_switches=-1)


def test_blocks_without_a_common_degree_need_a_switch() -> None:
    chain = three_blocks()
    low, high = chain.blocks[0].choices
    chain = Chain((ChainBlock("one", (low,)), ChainBlock("two", (high,))), (((10.0,),),))
    assert solve_chain(chain, max_switches=1).degrees == (1, 2)
    with pytest.raises(PlanError, match="allow more switches"):
        solve_chain(chain, max_switches=0)


@pytest.mark.parametrize("hidden", [2048, 4096, 8192])
def test_models_of_table_6_are_planned_within_the_budget(hidden: int) -> None:
    model = model_of(hidden)
    chain = chain_of(model, "3090")
    found = solve_chain(chain, BUDGET_BYTES)
    assert len(found.degrees) == 2 * model.layers
    assert found.memory_bytes <= BUDGET_BYTES
    assert found.num_labels < 20_000


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
