"""What a plan says beside shardings is really carried out, and stays equal to eager."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardweave.ir.dialects.annotations import phase_of
from shardweave.passes.memory.rematerialize import POLICIES
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.overlap.overlap_communication import SCHEDULES
from shardweave.planners.plan import plan_parts
from shardweave.planners.plan.plan import Plan, PlanError
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron


def test_policies_and_schedules_of_a_plan_are_those_of_the_passes() -> None:
    assert set(plan_parts.RECOMPUTE) == set(POLICIES) - {"budget"}
    assert set(plan_parts.SCHEDULES) == {"", *SCHEDULES}


@pytest.mark.parametrize(
    ("split", "policy", "schedule"),
    [(2, "none", ""), (1, "layer", "list"), (2, "after-communication", "cross-pass")],
)
def test_sub_batches_recomputation_and_schedule_of_a_plan_equal_eager(
    split: int, policy: str, schedule: str
) -> None:
    plan = megatron(SPECS["gpt"], "data=2,tensor=2")
    plan = replace(
        plan, batch_split=split, recompute=policy, schedule=schedule, cluster="perlmutter"
    )
    program = local_program(captured(SPECS["gpt"]).program, plan)
    ops = list(program.ops)
    assert any("copy" in op.properties for op in ops) is (split > 1)
    assert any(phase_of(op) == "recompute" for op in ops) is (policy != "none")
    assert any(op.name == "dist.wait" for op in ops)
    assert_equals_eager(program, captured(SPECS["gpt"]))


def test_schedule_list_needs_the_cluster_that_it_orders_for() -> None:
    with pytest.raises(PlanError, match="'list' orders ops for a cluster, and the plan names none"):
        plan_passes(Plan(schedule="list"))


def test_zero_needs_replicas_to_divide_over() -> None:
    with pytest.raises(PlanError, match="divides over axis 'data', but the mesh is tensor=2"):
        local_program(captured(SPECS["gpt"]).program, Plan(mesh={"tensor": 2}, zero=1))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_without_stages_equals_eager(zero: int) -> None:
    plan = replace(megatron(SPECS["gpt"], "data=2"), zero=zero)
    program = local_program(captured(SPECS["gpt"]).program, plan)
    assert_equals_eager(program, captured(SPECS["gpt"]))
    again = [
        op for op in program.ops if op.name.endswith("all_gather") and phase_of(op) != "forward"
    ]
    assert bool(again) is (zero == 3)
