"""What `auto` returns runs: the plans of its space, and of models whose micro-batches cannot."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from random import Random

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions, plan_auto
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints, point_of
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import joint_space
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.tests.unforeseen import HERE
from shardweave.tests.zoo import SPECS, Captured, assert_equals_eager, captured

CLUSTER = find_cluster("perlmutter:nodes=1")  # 4 devices
GPT = "gpt:layers=2,hidden=16,heads=4,vocab=32,seq=8,batch=4"
CNN = "cnn:depth=10,channels=8,size=8,batch=4"  # with batch norm
STAGED = JointPoint(stages=2, micro_batches=2, schedule="cross-pass", pipeline="zero-bubble")
QUICK = AutoOptions(simulate=2, propose=False)


@cache
def evaluator(spec: str) -> Evaluator:
    reader = CostReader(Depths.of(captured(spec).program), CLUSTER)
    return Evaluator(PlanMaker(Estimator(reader), CLUSTER.name))


@cache
def points(spec: str) -> tuple[JointPoint, ...]:
    """All that `auto` may return but what other planners propose, in an order drawn by seed."""
    space = joint_space(evaluator(spec).maker.estimator.reader, None, Constraints())
    cut = (point for tensor in space.cuts.tensor for point in space.sequence_points(tensor))
    found = [v for point in (*space.points(), *cut) for v in space.variants(point)]
    Random(0).shuffle(found)
    return tuple(found)


def assert_runs(plan: Plan, case: Captured) -> None:
    plan = Plan.from_json(plan.to_json())
    assert_equals_eager(partition(case.program, Mesh(**plan.mesh), plan), case)


NUMBERS = [pytest.param(n, marks=[pytest.mark.slow] if n >= 3 else []) for n in range(40)]


@pytest.mark.parametrize("number", NUMBERS)
def test_plan_of_a_point_that_is_simulated_equals_eager(number: int) -> None:
    simulated = (point for point in points(GPT) if evaluator(GPT).predict(point) is not None)
    point = next(islice(simulated, number, None))
    assert_runs(evaluator(GPT).maker.plan(point, captured(GPT).program), captured(GPT))


@pytest.mark.parametrize(
    ("model", "point"),
    [
        # Positions of a lookup by devices that hold some of the words go from stage to stage.
        ("llama", STAGED.with_value(context=2, tensor=2)),
        # Inputs that are cut in time are kept for the gradients of weights.
        ("gpt", STAGED.with_value(tensor=2, sequence_parallel=True, sub_batches=2)),
        pytest.param(
            "bert",
            STAGED.with_value(pipeline="dualpipe-v", micro_batches=4, context=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "unet",
            STAGED.with_value(pipeline="zero-bubble-v", tensor=2, recompute="layer"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plan_of_a_staged_point_equals_eager(model: str, point: JointPoint) -> None:
    case = captured(SPECS[model])
    assert_runs(evaluator(SPECS[model]).maker.plan(point, case.program), case)


def test_dimensions_of_a_plan_are_those_of_the_point_that_it_was_made_of() -> None:
    maker = evaluator(GPT).maker
    of_pipelines = {p.pipeline: p for p in points(GPT) if p.stages == 2 and p.micro_batches == 4}
    assert {"1f1b", "interleaved-1f1b", "dualpipe-v"} <= of_pipelines.keys()
    for point in of_pipelines.values():
        assert point_of(maker.plan(point, captured(GPT).program)) == point


@pytest.mark.parametrize("fix", ["zero=3", "tensor=2,data=2"])
def test_plan_of_a_model_without_repeated_blocks_equals_eager(fix: str) -> None:
    case = captured(f"{HERE}:perceptron")
    assert {point.tensor for point in points(f"{HERE}:perceptron")} == {1, 2, 4}
    plan = plan_auto(case.program, None, cluster=CLUSTER, options=replace(QUICK, fix=fix))
    assert_runs(plan, case)


def test_no_plan_has_micro_batches_that_a_batch_norm_joins() -> None:
    found = points(CNN)
    assert found
    assert {point.micro_batches for point in found} == {1}
    assert any(point.stages > 1 for point in found)


@pytest.mark.parametrize("fix", ["tensor=1,zero=1", "stages=2,tensor=1"])
def test_plan_of_a_model_with_batch_norm_equals_eager(fix: str) -> None:
    case = captured(CNN)
    plan = plan_auto(case.program, None, cluster=CLUSTER, options=replace(QUICK, fix=fix))
    assert_runs(plan, case)


def test_plan_that_no_backend_runs_is_refused_with_the_reason() -> None:
    options = replace(QUICK, fix="micro_batches=2,stages=2,tensor=1")
    with pytest.raises(PlanError, match=r"no plan with micro_batches=2.*as in batch norm"):
        plan_auto(captured(CNN).program, None, cluster=CLUSTER, options=options)
