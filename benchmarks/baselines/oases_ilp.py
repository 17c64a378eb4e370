"""Oases' chain as an integer linear program: the paper's own way, beside `oases.dp`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, cast

import pulp  # pyright: ignore[reportMissingTypeStubs]
from pulp.apis import coin_api  # pyright: ignore[reportMissingTypeStubs]

from shardweave.planners.oases.chain import Chain, ChainCosts, linearise
from shardweave.planners.oases.dp import Solution, solve_chain
from shardweave.planners.plan.plan_parts import PlanError

_BUNDLED_CBC = str(getattr(coin_api, "pulp_cbc_path", ""))


def solve_chain_ilp(
    chain: Chain,
    budget_bytes: float = math.inf,
    *,
    solver: str = "highs",
    costs: ChainCosts | None = None,
) -> Solution:
    """The degrees of least time whose memory is at most `budget_bytes`, by an ILP in PuLP.

    Objective, options and errors are those of `oases.dp.solve_chain`. Exact up to
    the solvers' tolerances, about a millionth of the time and of the budget. Raises ValueError
    for a solver that is unknown or not installed.

    Variables, for block i of k with choices a and its successor's choices b:

        s[i,a]   binary      block i has choice a
        e[i,a,b] in [0, 1]   block i has choice a and block i + 1 choice b

        minimise  sum_i sum_a unary_s[i][a] s[i,a]
                + sum_{i<k} sum_{a,b} edge_s[i][a][b] e[i,a,b]           (3), (4)

    `oases.chain.linearise` has put the maxima of (3) into these numbers, so that no variable
    stands for a maximum and no big-M is needed. The e need not be integers: where s is, the row
    and column sums below leave them one value each.
    """
    costs = costs or linearise(chain)
    # HiGHS and CBC judge by absolute tolerances, which seconds of microseconds would fall under.
    scale = 1.0 / max(max(map(max, costs.unary_s)), 1e-30)
    problem = pulp.LpProblem("oases", pulp.LpMinimize)
    chosen, moved = _variables(problem, costs)
    _objective(problem, costs, chosen, moved, scale)
    _one_choice(problem, chosen)
    _edges_follow(problem, chosen, moved)
    if budget_bytes < math.inf:
        _memory(problem, costs, chosen, budget_bytes)
    status: int = cast("Any", problem).solve(_solver(solver))
    if status == pulp.LpStatusInfeasible:
        # The exact solver knows which path is closest, and raises with what is missing.
        solve_chain(chain, budget_bytes, costs=costs)
    if status != pulp.LpStatusOptimal:
        raise PlanError(
            f"{solver} ended with status '{pulp.LpStatus[status]}', expected an optimum; use the "
            "other solver, or `oases.dp.solve_chain`."
        )
    path = tuple(
        max(range(len(row)), key=lambda a: float(cast("float", row[a].varValue))) for row in chosen
    )
    return Solution(path, chain.degrees(path), costs.time_s(path), costs.memory(path))


Row = list[pulp.LpVariable]


def _variables(problem: pulp.LpProblem, costs: ChainCosts) -> tuple[list[Row], list[list[Row]]]:
    """s and e."""
    chosen = [
        [problem.add_variable(f"s_{i}_{a}", 0, 1, "Binary") for a in range(len(row))]
        for i, row in enumerate(costs.unary_s)
    ]
    moved = [
        [
            [problem.add_variable(f"e_{i}_{a}_{b}", 0, 1) for b in range(len(row))]
            for a, row in enumerate(matrix)
        ]
        for i, matrix in enumerate(costs.edge_s)
    ]
    return chosen, moved


def _objective(
    problem: pulp.LpProblem,
    costs: ChainCosts,
    chosen: list[Row],
    moved: list[list[Row]],
    scale: float,
) -> None:
    """Minimise sum unary_s s + sum edge_s e."""
    terms: list[tuple[pulp.LpVariable, float]] = []
    for row, values in zip(chosen, costs.unary_s, strict=True):
        terms += [(s, scale * value) for s, value in zip(row, values, strict=True)]
    for rows, matrix in zip(moved, costs.edge_s, strict=True):
        for row, values in zip(rows, matrix, strict=True):
            terms += [(e, scale * value) for e, value in zip(row, values, strict=True)]
    problem += pulp.LpAffineExpression(terms)


def _one_choice(problem: pulp.LpProblem, chosen: list[Row]) -> None:
    """Each block has one choice: for all i, sum_a s[i,a] = 1."""
    for row in chosen:
        problem += pulp.lpSum(row) == 1


def _edges_follow(problem: pulp.LpProblem, chosen: list[Row], moved: list[list[Row]]) -> None:
    """An edge joins the choices of its ends.

    For all i < k and a, sum_b e[i,a,b] = s[i,a]; for all i < k and b, sum_a e[i,a,b] = s[i+1,b].
    """
    for i, rows in enumerate(moved):
        for s, row in zip(chosen[i], rows, strict=True):
            problem += pulp.lpSum(row) == s
        for s, column in zip(chosen[i + 1], zip(*rows, strict=True), strict=True):
            problem += pulp.lpSum(column) == s


def _memory(
    problem: pulp.LpProblem, costs: ChainCosts, chosen: list[Row], budget_bytes: float
) -> None:
    """The memory (6): sum_i sum_a memory_bytes[i][a] s[i,a] <= budget, as shares of the budget."""
    terms = [
        (s, size / budget_bytes)
        for row, sizes in zip(chosen, costs.memory_bytes, strict=True)
        for s, size in zip(row, sizes, strict=True)
    ]
    problem += pulp.LpAffineExpression(terms) <= 1


def _solver(name: str) -> Any:
    options: dict[str, Any] = {"msg": False, "gapRel": 0.0, "gapAbs": 0.0, "threads": 1}
    if name == "highs":
        solver = pulp.HiGHS(**options)
    elif name == "cbc":
        # PuLP 3 ships a CBC, PuLP 4 takes it from its extra `cbc` or the system.
        path = shutil.which("cbc") or _BUNDLED_CBC
        solver = pulp.COIN_CMD(path=path if Path(path).exists() else None, **options)
    else:
        raise ValueError(f"solver '{name}' is unknown; use one of highs, cbc.")
    if not solver.available():
        raise ValueError(f"solver '{name}' is not installed; install it, or use the other.")
    return solver
