"""What a plan says beside shardings is really carried out, and stays equal to eager."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import annotate, phase_of
from shardweave.ir.dialects.aten import create
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes import registry
from shardweave.passes.memory.rematerialize import POLICIES
from shardweave.passes.program_pass import PassOnProgram
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import Lowerings, local_program
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.plan_passes import PlanPasses, plan_passes
from shardweave.planners.overlap.axonn_orders import AXONN_ORDERS
from shardweave.planners.overlap.overlap_communication import SCHEDULES
from shardweave.planners.plan import plan_parts
from shardweave.planners.plan.plan import Plan, PlanError
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron


def test_policies_and_schedules_of_a_plan_are_those_of_the_passes() -> None:
    assert set(plan_parts.RECOMPUTE) == set(POLICIES) - {"budget"}
    assert set(plan_parts.SCHEDULES) == {"", *SCHEDULES, *AXONN_ORDERS}


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
    with pytest.raises(
        PlanError, match="'list' orders ops for a cluster, but the plan names no cluster"
    ):
        plan_passes(Plan(schedule="list"))


@dataclass(frozen=True)
class MoreNegationsPass(PassOnProgram):
    """Negate the step's first result twice."""

    name = "more-negations"

    def run(self, program: Program) -> None:
        last = program.return_op
        value = last.operands[0]
        for _ in range(2):
            op = create("aten.neg", [value], [value.type])
            annotate(op, last)
            Rewriter.insert_op(op, InsertPoint.before(last))
            value = op.results[0]
        last.operands[0] = value


PLANS = (
    replace(megatron(SPECS["gpt"], "data=2,tensor=2"), recompute="layer"),
    replace(megatron(SPECS["gpt"], "data=2,tensor=2"), batch_split=2, schedule="cross-pass"),
    replace(
        megatron(SPECS["gpt"], "data=2"),
        mesh={"pipeline": 2, "data": 2},
        pipeline=Pipeline((("wte", "wpe"), ("h.*", "ln_f", "head")), 2),
    ),
)


@pytest.mark.parametrize("plan", PLANS, ids=("recompute", "sub-batches", "stages"))
def test_plan_that_lists_its_derived_passes_gives_the_same_program(plan: Plan) -> None:
    program = captured(SPECS["gpt"]).program
    listed = replace(plan, passes=str(PlanPasses.of(plan)))
    assert Plan.from_json(listed.to_json()) == listed
    assert PlanPasses.of(listed) == PlanPasses.of(plan)
    same = str(local_program(program, plan))
    assert str(local_program(program, listed)) == same
    assert str(Lowerings(program).local(listed)) == same


@pytest.mark.parametrize("after", ["dce", "start-collectives"])
@pytest.mark.parametrize("plan", PLANS[:2], ids=("recompute", "sub-batches"))
def test_own_pass_that_a_plan_lists_is_priced_and_runs(
    plan: Plan, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "PASSES", dict(registry.PASSES))
    registry.register_pass(MoreNegationsPass)
    case = captured(SPECS["gpt"])
    passes = str(PlanPasses.of(plan)).replace(f"{after},", f"{after},more-negations,")
    listed = replace(plan, passes=passes)
    lowerings = Lowerings(case.program)
    priced = lowerings.local(listed)
    runs = partition(case.program, Mesh(**plan.mesh), listed)
    assert str(priced) == str(runs)
    num_ops = [
        sum(op.name == "aten.neg" for op in each.ops) for each in (runs, lowerings.local(plan))
    ]
    assert num_ops[0] == num_ops[1] + 2
    assert "aten.neg" in str(lowerings.blocking(listed))
    assert_equals_eager(runs, case)
    cluster = find_cluster("perlmutter")
    slower, faster = (predict_plan(lowerings, each, cluster).time_s for each in (listed, plan))
    assert slower > faster


def test_passes_of_a_plan_may_not_lack_what_its_other_fields_ask_for() -> None:
    plan = replace(PLANS[0], passes="preset:default")
    with pytest.raises(
        PlanError, match=r"the plan's 'passes' do not include 'rematerialize'.*fields need: "
    ):
        local_program(captured(SPECS["gpt"]).program, plan)
    with pytest.raises(ValueError, match="there is no pass 'ces'"):
        plan_passes(replace(plan, passes="ces"))


def test_zero_needs_replicas_to_divide_over() -> None:
    with pytest.raises(PlanError, match="over the axis 'data', but the mesh tensor=2 has no such"):
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
