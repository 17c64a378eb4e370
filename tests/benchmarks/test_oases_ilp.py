"""Oases' chain as an integer program: the same optimum as the exact search, by both solvers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from shardweave.benchmarks.baselines.oases_ilp import solve_chain_ilp
from shardweave.benchmarks.oases_literal import published_costs
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.dp import Solution, solve_chain
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.tests.planners.small_chains import random_budget, random_chain, three_blocks

SOLVERS = ("highs", "cbc")


def check_agreement(seed: int, *, longest: int) -> None:
    chain = random_chain(seed, longest=longest)
    costs = published_costs(chain) if seed % 3 == 0 else None
    budget = random_budget(seed, chain)
    wanted = solved(partial(solve_chain, chain, budget, costs=costs))
    for solver in SOLVERS:
        found = solved(partial(solve_chain_ilp, chain, budget, solver=solver, costs=costs))
        if isinstance(wanted, Solution):
            assert isinstance(found, Solution), f"seed {seed}, {solver}"
            assert found.time_s == pytest.approx(wanted.time_s, rel=1e-6), f"seed {seed}, {solver}"
            assert found.memory_bytes <= budget
        else:
            assert found == wanted


def solved(solve: Callable[[], Solution]) -> Solution | str:
    """The solution, or the message of the error."""
    try:
        return solve()
    except PlanError as error:
        return str(error)


def test_search_equals_both_ilp_solvers_on_random_chains() -> None:
    for seed in range(40):
        check_agreement(seed, longest=6)


@pytest.mark.slow
def test_search_equals_both_ilp_solvers_on_500_random_chains() -> None:
    for seed in range(1000, 1500):
        check_agreement(seed, longest=16)


@pytest.mark.parametrize("solver", SOLVERS)
def test_ilp_that_does_not_fit_names_the_shortfall(solver: str) -> None:
    with pytest.raises(PlanError, match=r"2\.00 GiB too much"):
        solve_chain_ilp(three_blocks(), 20 * GIB, solver=solver)


def test_unknown_solver_is_refused() -> None:
    with pytest.raises(ValueError, match="solver 'glpk' is unknown; use one of highs, cbc"):
        solve_chain_ilp(three_blocks(), solver="glpk")
