"""Every command says the same of a plan, and a deep model's step is that of all its blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shardweave.benchmarks.one_prediction import WITHIN, numbers_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.staged import functions_of
from shardweave.passes.pipeline import run_passes
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.call import call_planner
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.lowering.plan_passes import plan_passes
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.predict import predict_plan
from shardweave.tests.planners.small_clusters import with_dtype
from shardweave.tests.zoo import assert_equals_eager, captured

ROOT = Path(__file__).resolve().parents[2]
SMALL = "gpt:layers=2,hidden=32,heads=4,vocab=32,seq=8,batch=8"
DEEP = "gpt:layers=9,hidden=64,heads=4,vocab=64,seq=128,batch=8"
ONE = Pipeline((("*",),), 2)
TWO = Pipeline((("wte", "wpe", "h.0"), ("h.1", "ln_f", "head")), 2)

PLANS = {
    "one program": ("data=4", {}),
    "zero": ("data=4", {"zero": 3}),
    "zero in one program, cross-pass": ("data=4", {"zero": 3, "schedule": "cross-pass"}),
    "sub-batches": ("data=2,tensor=2", {"batch_split": 2, "schedule": "sub-batch"}),
    "recomputed": ("data=4", {"recompute": "layer", "zero": 2}),
    "micro-batches": ("data=4", {"pipeline": ONE, "zero": 3}),
    "micro-batches, cross-pass": (
        "data=4",
        {"pipeline": ONE, "zero": 2, "schedule": "cross-pass", "recompute": "layer"},
    ),
    "stages that the plan leaves out": ("pipeline=2,data=2", {}),
    "1f1b": ("pipeline=2,data=2", {"pipeline": TWO, "zero": 1}),
    "1f1b of one micro-batch": (
        "pipeline=2,data=2",
        {"pipeline": replace(TWO, micro_batches=1), "zero": 3},
    ),
    "update": ("data=4", {"zero": 3, "update": "Muon"}),
    "update of stages": ("pipeline=2,data=2", {"pipeline": TWO, "zero": 1, "update": "AdamW"}),
    "gpipe": ("pipeline=2,tensor=2", {"pipeline": replace(TWO, schedule="gpipe")}),
    "zero-bubble": (
        "pipeline=2,data=2",
        {"pipeline": replace(TWO, schedule="zero-bubble"), "recompute": "layer"},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_commands_say_the_same_of_a_plan(name: str) -> None:
    mesh, options = PLANS[name]
    program = captured(SMALL).program
    sizes = {axis.name: axis.size for axis in Mesh.parse(mesh).axes}
    inside = {axis: size for axis, size in sizes.items() if axis != "pipeline"}
    plan: Plan = replace(plan_megatron(program, Mesh(**inside)), mesh=sizes, **options)
    first, *others = numbers_of(program, plan, find_cluster("testbed:nodes=4")).values()
    assert first.time_s > 0
    assert max(first.apart(other) for other in others) < WITHIN


def test_recorded_problems_agree_and_none_of_their_pairs_is_misplaced() -> None:
    record = json.loads((ROOT / "benchmarks/results/one_prediction.json").read_text())
    assert max(row["apart"] for row in record["rows"]) < WITHIN
    for row in record["explained"]:
        whole_s = {name: whole for name, (_, whole) in row["times_s"].items()}
        assert all(whole_s[first] < whole_s[second] for first, second in row["pairs"]), row


@cache
def deep() -> tuple[Evaluator, Lowerings]:
    program = captured(DEEP).program
    reader = CostReader(Depths.of(program), with_dtype(find_cluster("dgx-a100")))
    return Evaluator(PlanMaker(Estimator(reader))), Lowerings(program)


@pytest.mark.parametrize(
    ("point", "update"),
    [
        (JointPoint(data=4, stages=2, micro_batches=2, zero=3), ""),
        (JointPoint(data=2, stages=4, micro_batches=4, pipeline="gpipe", recompute="layer"), ""),
        (JointPoint(data=1, tensor=2, stages=4, micro_batches=4, pipeline="zero-bubble"), "AdamW"),
        (JointPoint(data=4, stages=2, micro_batches=2, pipeline="interleaved-1f1b", zero=1), ""),
        (JointPoint(data=8, micro_batches=1, zero=3), "AdamW"),
    ],
)
def test_step_of_a_few_blocks_in_each_stage_is_that_of_all(point: JointPoint, update: str) -> None:
    evaluator, lowerings = deep()
    evaluator = replace(evaluator, maker=replace(evaluator.maker, update=update))
    assert evaluator.depths.is_deep
    found = evaluator.predict(point)
    assert found is not None, evaluator.problems
    plan = evaluator.maker.plan(point, lowerings.program)
    whole = predict_plan(lowerings, plan, evaluator.maker.estimator.cluster)
    assert found.time_s == pytest.approx(whole.time_s, rel=WITHIN)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.03)


def test_norms_under_sequence_parallelism_are_scattered_apart_in_micro_batches() -> None:
    """Their gradients are pending over `tensor` too, so that they join no other message."""
    case = captured(SMALL)
    plan = plan_megatron(case.program, Mesh(data=2, tensor=2), sequence_parallel=True)
    plan = replace(plan, zero=2, pipeline=ONE)
    local = run_passes(case.program.clone(), plan_passes(plan))
    assert_equals_eager(local, case)


def test_stages_of_one_micro_batch_each_run_their_own_backward_pass() -> None:
    """A count of labels, which no stage makes, is not waited for behind the first stage."""
    plan = replace(
        plan_megatron(captured(SMALL).program, Mesh(data=2)),
        mesh={"pipeline": 2, "data": 2},
        pipeline=replace(TWO, micro_batches=1),
    )
    step = run_passes(captured(SMALL).program.clone(), plan_passes(plan))
    assert {"backward_0", "backward_1"} <= functions_of(step).keys()
    assert_equals_eager(step, captured(SMALL))


def test_auto_is_not_slower_than_amp_where_devices_differ() -> None:
    """Of a model so deep that its own points are read off a few blocks."""
    kinds = {"fast": 1.0, "slow": 0.25}
    base = find_cluster("amp-het-cluster")
    device = base.devices["V100-16GB"]
    on = replace(
        base,
        devices={
            name: replace(device, name=name, flops={k: x * v for k, v in device.flops.items()})
            for name, x in kinds.items()
        },
        nodes=tuple(replace(base.nodes[0], device=name, count=1, devices=2) for name in kinds),
    )
    program = captured(DEEP).program
    options = {"simulate": 4}
    plan = call_planner("auto", program, None, cluster=with_dtype(on), options=options)
    amp = call_planner("amp", program, None, cluster=with_dtype(on))
    assert plan.predicted is not None
    assert amp.predicted is not None
    assert plan.predicted.time_s <= amp.predicted.time_s
