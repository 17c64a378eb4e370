"""Predictions of plans: parts that add up, and words for why one lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Predicted
from shardweave.planners.predict.predict import (
    predict_plan,
    simulate_step,
    time_parts,
    why_slower,
    with_candidates,
)
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.zoo import SPECS, captured, megatron

BEST = Predicted(1e-3, 8e-4, {"data": 1e-4, "tensor": 3e-4}, 2e-4, memory_bytes={"a": 5})


def test_simulated_plan_has_the_simulators_numbers() -> None:
    plan = megatron(SPECS["gpt"], "data=2,tensor=2")
    program, cluster = captured(SPECS["gpt"]).program, find_cluster("perlmutter")
    found = predict_plan(program, plan, cluster)
    step = simulate(local_program(program, plan), cluster, optimizer_multiplier=2.0)
    assert found.time_s == step.time_s == pytest.approx(sum(time_parts(found).values()))
    assert found.peak_bytes == step.peak_bytes
    assert found.capacity_bytes == step.memory_bytes


def test_plan_that_names_no_stages_is_simulated_with_those_it_would_run_with() -> None:
    program = captured(SPECS["gpt"]).program
    plan = replace(megatron(SPECS["gpt"], "data=2"), mesh={"pipeline": 2, "data": 2})
    run = with_pipeline(plan, program, Mesh(pipeline=2, data=2))
    found, step = (simulate_step(program, "perlmutter", plan=one) for one in (plan, run))
    assert run.num_stages == 2
    assert found.time_s == step.time_s
    assert found.peak_bytes == step.peak_bytes


def test_exposed_time_is_dealt_out_by_communication() -> None:
    assert time_parts(BEST) == pytest.approx({"compute": 8e-4, "data": 5e-5, "tensor": 1.5e-4})


def test_reason_names_the_parts_that_made_a_plan_slower() -> None:
    slow = Predicted(2e-3, 7e-4, {"tensor": 1e-3}, 1e-3, bubble_s=3e-4)
    assert why_slower(BEST, slow) == (
        "1.00 ms slower (tensor +0.85 ms, bubble +0.30 ms, compute -0.10 ms)"
    )
    assert why_slower(BEST, BEST) == "takes as long"
    assert why_slower(BEST, replace(BEST, time_s=1e-3 + 1e-18)) == "takes as long"
    assert why_slower(BEST, replace(BEST, time_s=1.005e-3)) == "a tie, 5 us slower"
    large = Predicted(1e-4, memory_bytes={"a": 3 * 2**30}, capacity_bytes=2**30)
    assert why_slower(BEST, large) == "does not fit, by 2.00 GiB"


def test_plan_lists_its_candidates_the_chosen_one_first() -> None:
    rows = [Candidate("a", BEST), Candidate("b", Predicted(2e-3, 2e-3))]
    plan = with_candidates(Plan(), rows)
    assert plan.predicted == BEST
    assert [one.reason for one in plan.candidates] == [
        "chosen",
        "1.00 ms slower (compute +1.20 ms, tensor -0.15 ms)",
    ]
    assert plan.reasons[-1].startswith("next best is b: 1.00 ms slower")
