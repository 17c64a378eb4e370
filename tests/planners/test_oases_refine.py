"""Degrees that are refined by simulation, on chains whose every path is tried too."""

from __future__ import annotations

import math
from itertools import product

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.oases.chain import Chain, linearise
from shardweave.planners.oases.dp import solve_chain
from shardweave.planners.oases.planner import Path, best_paths, plan_oases, refined
from shardweave.planners.plan.plan_parts import Predicted
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.planners.small_chains import random_chain
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured


def all_paths(chain: Chain) -> list[Path]:
    return list(product(*(range(len(block.choices)) for block in chain.blocks)))


@pytest.mark.parametrize("seed", range(40))
def test_best_paths_are_those_of_all_paths_in_order(seed: int) -> None:
    chain = random_chain(seed)
    costs = linearise(chain)
    times = sorted(costs.time_s(path) for path in all_paths(chain))
    found = [costs.time_s(path) for path in best_paths(costs, 5)]
    assert found == pytest.approx(times[:5])


def test_changes_of_single_blocks_lead_to_what_the_chain_does_not_like() -> None:
    chain = random_chain(3, longest=5)
    costs = linearise(chain)
    slowest = max(all_paths(chain), key=costs.time_s)
    asked: list[Path] = []

    def simulate(path: Path) -> Predicted:
        asked.append(path)
        far = sum(a != b for a, b in zip(path, slowest, strict=True))
        return Predicted(1.0 + far)

    first = solve_chain(chain).path
    found = refined(costs, first, math.inf, simulate, 10**6)
    assert next(iter(found)) == slowest
    assert first in found
    assert len(asked) == len(set(asked)) == len(found)
    assert [*found.values()] == sorted(found.values(), key=lambda one: one.time_s)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_paths_are_simulated_than_asked_for(most: int) -> None:
    chain = random_chain(3)
    costs = linearise(chain)
    first = solve_chain(chain).path
    found = refined(costs, first, math.inf, lambda path: Predicted(costs.time_s(path)), most)
    assert len(found) <= max(1, most)
    assert first in found


def test_path_that_fits_goes_before_a_faster_one_that_does_not() -> None:
    chain = random_chain(3)
    costs = linearise(chain)
    first = solve_chain(chain).path

    def simulate(path: Path) -> Predicted:
        size = 1.0 if path == first else 3.0
        time_s = 2.0 if path == first else 1.0
        return Predicted(time_s, memory_bytes={"parameters": size}, capacity_bytes=2.0)

    assert next(iter(refined(costs, first, math.inf, simulate, 50))) == first


def test_refined_plan_is_not_slower_than_the_model_s_and_equals_eager() -> None:
    case, cluster, mesh = captured(SPECS["gpt"]), find_cluster("oases-3090"), Mesh(tensor=4)
    plain = plan_oases(case.program, mesh, cluster=cluster, refine=0)
    plan = plan_oases(case.program, mesh, cluster=cluster, refine=6)
    assert plan.predicted is not None
    took = predict_plan(case.program, plan, cluster)
    assert took.time_s == plan.predicted.time_s
    assert took.time_s <= predict_plan(case.program, plain, cluster).time_s
    assert any("6 assignments were simulated" in reason for reason in plan.reasons)
    assert_equals_eager(local_program(case.program, plan), case)
