"""Recomputing some layers: the pass, plans that say which, and the number that `auto` finds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator, extrapolated
from shardweave.planners.auto.planner import AutoOptions, plan_auto
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import point_of, with_memory
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.plan.plan_parts import Pipeline, PlanError, Predicted
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.zoo import assert_equals_eager, captured

GPT = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=4"
LONG = "gpt:layers=4,hidden=64,heads=4,vocab=32,seq=128,batch=4"
DEEP = "gpt:layers=12,hidden=64,heads=4,vocab=32,seq=64,batch=4"
NODE = find_cluster("perlmutter:nodes=1")
ALONE = replace(NODE, nodes=(replace(NODE.nodes[0], devices=1),))
STAGES = (("wte", "wpe", "h.0", "h.1"), ("h.2", "h.3", "ln_f", "lm_head"))

FOUR_STAGES = (("wte", "wpe", "h.0"), ("h.1",), ("h.2",), ("h.3", "ln_f", "lm_head"))


@cache
def evaluator(spec: str, deep: int = 8) -> Evaluator:
    reader = CostReader(Depths.of(captured(spec).program, deep), NODE)
    return Evaluator(PlanMaker(Estimator(reader), NODE.name))


def recomputed_blocks(program: Program) -> set[str | None]:
    blocks = blocks_of(program)
    return {blocks.of_op(op) for op in program.ops if phase_of(op) == "recompute"}


def test_pass_recomputes_in_the_blocks_that_are_named() -> None:
    program = captured(GPT).program
    for blocks, found in (("h.1,h.3", {"h.1", "h.3"}), ("h.[01]", {"h.0", "h.1"})):
        after = run_passes(program, f'rematerialize{{policy="layer" blocks="{blocks}"}}')
        assert recomputed_blocks(after) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('policy="layer" blocks="h.9"', "there is no block 'h.9'; the program has h.0, h.1, h.2"),
        (
            'policy="budget" bytes=1 blocks="h.0"',
            "chooses the blocks itself; remove the option blocks",
        ),
    ],
)
def test_blocks_that_cannot_be_are_told(options: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        run_passes(captured(GPT).program, f"rematerialize{{{options}}}")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh={"data": 2}, recompute="layer", recompute_in=("h.1", "h.2")),
        Plan(mesh={"data": 2}, recompute="after-communication", recompute_in=("h.[0-2]",), zero=3),
        Plan(
            mesh={"pipeline": 2, "data": 1},
            recompute="layer",
            recompute_in=("h.0", "h.2"),
            pipeline=Pipeline(STAGES, 2, schedule="zero-bubble"),
        ),
        Plan(
            mesh={"pipeline": 2, "data": 2},
            recompute="layer",
            recompute_in=("h.0", "h.2"),
            pipeline=Pipeline(FOUR_STAGES, 4, schedule="dualpipe-v"),
        ),
    ],
)
def test_plan_that_recomputes_some_layers_equals_eager(plan: Plan) -> None:
    case = captured(GPT)
    plan = Plan.from_json(plan.to_json())
    assert_equals_eager(partition(case.program, Mesh(**plan.mesh), plan), case)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(recompute_in=("h.0",)), "but 'recompute' is none; set 'recompute' to a policy"),
        (Plan(recompute="layer", recompute_in=("h.7",)), "'recompute_in' names block 'h.7'"),
    ],
)
def test_blocks_of_a_plan_that_cannot_be_are_told(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, captured(GPT).program)


@pytest.mark.parametrize("pipeline", ["1f1b", "zero-bubble"])
def test_each_layer_that_is_recomputed_takes_time_and_spares_memory(pipeline: str) -> None:
    one = evaluator(LONG)
    point = JointPoint(data=1, stages=2, micro_batches=2, schedule="cross-pass", pipeline=pipeline)
    found = [
        one.predict(point),
        one.predict(point.with_value(recompute="layer", recompute_layers=1)),
        one.predict(point.with_value(recompute="layer")),
    ]
    times = [step.time_s for step in found if step]
    sizes = [step.peak_bytes for step in found if step]
    assert times == sorted(times)
    assert len(set(times)) == 3
    assert sizes[0] > sizes[1] >= sizes[2]


def test_point_of_a_plan_tells_the_number_of_layers() -> None:
    case = evaluator(LONG)
    for stages in (1, 2):
        point = JointPoint(data=1, stages=stages, micro_batches=2, schedule="cross-pass")
        point = point.with_value(recompute="layer", recompute_layers=1)
        assert point_of(case.maker.plan(point, case.depths.program)) == point


@pytest.mark.parametrize("point", [
    JointPoint(data=4, recompute="layer", recompute_layers=5),
    JointPoint(data=2, stages=2, micro_batches=2, schedule="cross-pass", recompute="layer",
               recompute_layers=3),
])  # fmt: skip
def test_step_of_a_deep_model_is_near_that_of_all_its_layers(point: JointPoint) -> None:
    deep, whole = evaluator(DEEP), evaluator(DEEP, 99)
    assert deep.depths.is_deep
    found, expected = deep.predict(point), whole.predict(point)
    assert found is not None
    assert expected is not None
    assert found.time_s == pytest.approx(expected.time_s, rel=0.01)
    # The line to where all are counts what a block computes again, which is gone when most is kept.
    more = 1.08 if point.stages > 1 else 1.03
    assert 0.97 <= found.peak_bytes / expected.peak_bytes <= more


def test_auto_recomputes_as_few_layers_as_fit() -> None:
    program = captured(LONG).program
    forbid = "recompute=after-communication,recompute=after-products"
    keep = AutoOptions(fix="recompute=none,micro_batches=1,sub_batches=1", propose=False)
    roomy = plan_auto(program, None, cluster=ALONE, options=keep)
    assert roomy.predicted is not None
    memory = int(0.8 * roomy.predicted.peak_bytes)
    options = AutoOptions(
        forbid=forbid, fix="micro_batches=1,sub_batches=1,offload=none", propose=False
    )
    small = with_memory(ALONE, f"{memory}B")
    plan = plan_auto(program, None, cluster=small, options=options)
    assert plan.predicted is not None
    assert plan.recompute == "layer"
    count = len(plan.recompute_in)
    assert 0 < count < 4
    fewer = replace(plan, recompute_in=plan.recompute_in[: count - 1])
    if not fewer.recompute_in:
        fewer = replace(fewer, recompute="none")
    assert not predict_plan(program, fewer, small).fits
    assert any(f"recompute_layers={count}" in reason for reason in plan.reasons)


def test_number_of_layers_can_be_fixed() -> None:
    options = AutoOptions(fix="recompute_layers=3", propose=False, simulate=4)
    plan = plan_auto(captured(GPT).program, None, cluster=ALONE, options=options)
    assert plan.recompute == "layer"
    assert plan.recompute_in == ("h.0", "h.1", "h.2")


def test_line_leaves_exposed_what_more_blocks_do_not_hide() -> None:
    few = Predicted(35.0, 33.0, exposed_s=2.0, memory_bytes={"parameters": 1.0})
    more = Predicted(46.0, 44.5, exposed_s=1.5, memory_bytes={"parameters": 2.0})
    found = extrapolated(few, more, 10.0)
    assert (found.time_s, found.compute_s, found.exposed_s) == (161.0, 159.5, 1.5)
    between = extrapolated(few, more, -0.5)  # where as many blocks are told apart by a policy
    assert (between.time_s, between.exposed_s) == (40.5, 1.75)
    growing = extrapolated(few, replace(more, exposed_s=2.5), 10.0)
    assert (growing.time_s, growing.exposed_s) == (156.0, 7.5)
