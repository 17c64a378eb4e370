"""The joint space of `auto`: chunks, recomputation, and values that make no difference somewhere."""

from __future__ import annotations

from functools import cache

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.driver.cli import main
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto import plan_auto
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints, point_of
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.sizes import shard_sizes
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.schedules.bounds import bubble_bound_s
from shardweave.tests.zoo import assert_equals_eager, captured

CLUSTER = find_cluster("perlmutter:nodes=1")  # 4 devices
DEEP = "gpt:layers=16,hidden=1024,heads=16,vocab=64,seq=1024,batch=8"
SHALLOW = "gpt:layers=6,hidden=16,heads=4,vocab=32,seq=8,batch=4"
FIXED = "stages=4,tensor=1,micro_batches=4,recompute=none"
INTERLEAVED = JointPoint(stages=4, micro_batches=4, pipeline="interleaved-1f1b")


@cache
def program() -> Program:
    with FakeTensorMode():
        example = build_example(DEEP)
    return capture(example.module, kwargs=example.kwargs)


@cache
def evaluator() -> Evaluator:
    return Evaluator(PlanMaker(Estimator(CostReader(Depths.of(program()), CLUSTER))))


def space(fix: str = "", forbid: str = "") -> JointSpace:
    reader = evaluator().maker.estimator.reader
    return joint_space(reader, None, Constraints.parse(fix, forbid), has_list=False)


def planned(fix: str = "", forbid: str = "", simulate: int = 12) -> Plan:
    options = AutoOptions(
        simulate=simulate, propose=False, fix=",".join(filter(None, (FIXED, fix))), forbid=forbid
    )
    return plan_auto(program(), None, cluster=CLUSTER, options=options)


def test_partitions_are_those_of_all_points() -> None:
    """So `profile` measures the pieces that the search prices, cut sequences among them."""
    found = joint_space(CostReader(Depths.of(program()), CLUSTER), None, Constraints())
    partitions = list(found.cuts.partitions())
    assert len(partitions) == len(set(partitions))
    assert {(point.cut, point.pieces) for point in found.all_points()} == set(partitions)
    assert {cut.context for cut, _ in partitions} == {1, 2, 4}


def chunks_of(found: JointSpace, point: JointPoint) -> set[int]:
    """Into how many stages the variants of a point cut what a device has."""
    return {one.chunks for one in found.variants(point) if one.pipeline == "interleaved-1f1b"}


def test_deep_models_are_cut_into_as_many_chunks_as_their_blocks_allow() -> None:
    # 16 blocks, and what stands before and behind them: 18 parts.
    assert chunks_of(space(), INTERLEAVED) == {2, 4}
    assert chunks_of(space(), INTERLEAVED.with_value(stages=2, data=2)) == {2, 4, 8}
    assert chunks_of(space("chunks=3"), INTERLEAVED) == {3}
    assert chunks_of(space(forbid="chunks=4"), INTERLEAVED) == {2}


def test_search_takes_the_fastest_number_of_chunks() -> None:
    times = {
        chunks: found.time_s
        for chunks in (2, 4)
        if (
            found := evaluator().predict(
                INTERLEAVED.with_value(chunks=chunks, schedule="cross-pass")
            )
        )
    }
    assert times[4] < times[2]
    plan = planned()
    assert point_of(plan).chunks == 4
    assert plan.num_stages == 16
    assert plan.predicted is not None
    assert plan.predicted.time_s == pytest.approx(times[4])


def test_bubble_of_more_chunks_is_that_of_the_closed_form() -> None:
    """(p - 1) (f + b) / v of Narayanan et al. 2021, of equal stages whose messages take no time."""
    found = evaluator().predict(INTERLEAVED.with_value(chunks=4, schedule="cross-pass"))
    assert found is not None
    cost = evaluator().maker.estimator.cost_of(INTERLEAVED)
    each = sum(cost.forward_s) / 4, sum(cost.backward_s) / 4
    bound_s = bubble_bound_s("interleaved-1f1b", 4, 4, *each, 0.0)
    assert found.bubble_s >= bound_s


@pytest.mark.parametrize("chunks", [2, 4])
def test_number_of_chunks_can_be_fixed(chunks: int) -> None:
    plan = planned(f"chunks={chunks},pipeline=interleaved-1f1b", simulate=4)
    assert plan.num_stages == 4 * chunks
    assert point_of(plan).chunks == chunks
    assert all(("4 chunks" in one.name) == (chunks == 4) for one in plan.candidates)


@pytest.mark.slow
def test_fixed_chunks_are_taken_of_shallow_models_too_and_run() -> None:
    case = captured(SHALLOW)
    options = AutoOptions(simulate=2, propose=False, fix="stages=2,chunks=4,tensor=1,data=2")
    plan = plan_auto(case.program, None, cluster=CLUSTER, options=options)
    assert plan.num_stages == 8
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == "interleaved-1f1b"
    assert_equals_eager(partition(case.program, Mesh(**plan.mesh), plan), case)


def test_forbidden_chunks_are_in_no_plan_and_other_orders_stay() -> None:
    plan = planned(forbid="chunks=4", simulate=6)
    assert plan.num_stages == 8
    assert not any("chunks" in one.name for one in plan.candidates)
    # Those of other orders are their schedules' own, and no choice.
    plan = planned(forbid="chunks=2,chunks=4", simulate=6)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == "1f1b"


@pytest.mark.parametrize(
    ("forbidden", "point"),
    [
        ("chunks=2", JointPoint(stages=2)),
        ("pipeline=1f1b", JointPoint(micro_batches=2)),
        ("buckets=2", JointPoint(data=2, micro_batches=2)),
        ("buckets=2", JointPoint(data=2, schedule="blocking")),
    ],
)
def test_values_that_make_no_difference_are_not_forbidden(
    forbidden: str, point: JointPoint
) -> None:
    constraints = Constraints.parse("", forbidden)
    assert constraints.allows(point)
    told = JointPoint(data=2, stages=2) if "buckets" not in forbidden else JointPoint(data=2)
    assert not constraints.allows(told.with_value(**_interleaved(forbidden)))


def _interleaved(forbidden: str) -> dict[str, str]:
    return {"pipeline": "interleaved-1f1b"} if "chunks" in forbidden else {}


@pytest.mark.parametrize("forbid", ["pipeline=1f1b", "chunks=2", "buckets=2"])
def test_forbidding_an_order_leaves_plans_of_one_stage(forbid: str) -> None:
    found = space("tensor=1,zero=0", forbid)
    assert any(point.stages == 1 for point in found.points())


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ("chunks=9,pipeline=interleaved-1f1b", r": stages can be 2; chunks can be 2 or 4\."),
        ("chunks=4,pipeline=1f1b", r": chunks can be 2; pipeline can be interleaved-1f1b\."),
    ],
)
def test_chunks_that_cannot_be_are_told(fix: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(fix)


def test_explain_names_the_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    model = "gpt:layers=16,hidden=256,heads=4,vocab=64,seq=256,batch=4"
    given = [
        "--fix",
        f"{FIXED},pipeline=interleaved-1f1b",
        "-O",
        "simulate=6",
        "-O",
        "propose=false",
    ]
    assert main(["plan", model, "--cluster", "perlmutter:nodes=1", *given, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "why: chunks: 2, 4" in text
    assert "4 chunks" in text
    assert "why: chunks=" in text


def test_after_products_is_looked_at_with_stages_or_where_it_is_asked_for() -> None:
    policies = {
        is_staged: {p.recompute for p in space().points() if (p.stages > 1) == is_staged}
        for is_staged in (True, False)
    }
    assert policies[True] - policies[False] == {"after-products"}
    asked = [*space("stages=1,recompute=after-products").points()]
    assert {point.recompute for point in asked} == {"after-products"}


def test_after_products_is_beside_points_of_one_stage_alone() -> None:
    point = JointPoint(data=4, recompute="layer")
    assert [*space().keeping_products(point)] == [point.with_value(recompute="after-products")]
    assert [*space("recompute=layer").keeping_products(point)] == []
    staged = point.with_value(data=1, stages=4)
    assert [*space().keeping_products(staged)] == []


@pytest.mark.parametrize("fix", ["pipeline=zero-bubble-v", "schedule=sub-batch", "chunks=4"])
def test_points_with_what_is_asked_of_schedules_can_be(fix: str) -> None:
    found = space(fix)
    assert all(found.is_possible(point) for point in found.points())
    assert any(True for _ in found.points())


def test_costs_of_after_products_are_those_of_its_program() -> None:
    point = JointPoint(stages=4, micro_batches=4, schedule="cross-pass")
    again = point.with_value(recompute="after-products")
    estimator = evaluator().maker.estimator
    before, after = estimator.cost_of(point), estimator.cost_of(again)
    assert after.forward_s == before.forward_s
    assert sum(after.backward_s) > sum(before.backward_s)
    # Of a block of 2 x 1,024 positions and 1,024 float32: q, k, v, what attention and each of three
    # products give, the wide one of 4,096; the log-sum-exp of 16 heads; and what the block gives.
    rows = 2 * 1024
    (middle,) = [block for block in after.blocks if block.name == "h.8"]
    kept = rows * 4 * (3 * 1024 + 1024 + 16 + 1024 + 4096 + 1024)
    assert middle.kept_bytes == kept < before.blocks[after.blocks.index(middle)].kept_bytes
    found = evaluator().predict(again)
    assert found is not None
    assert estimator.estimate(again).time_s == pytest.approx(found.time_s, rel=0.05)
    assert estimator.estimate(again).memory_bytes == pytest.approx(found.peak_bytes, rel=0.1)


def test_zero_may_divide_among_fewer_than_all_replicas() -> None:
    found = {(point.replica, point.data, point.zero) for point in space().points()}
    assert {(1, 4, 0), (1, 4, 3), (2, 2, 1), (2, 2, 3), (1, 2, 0)} <= found
    # Where nothing is divided, further replicas are as all others.
    assert not [one for one in found if one[0] > 1 and (one[1] == 1 or one[2] == 0)]
    assert {point.replica for point in space("replica=2").points()} == {2}
    assert {point.replica for point in space(forbid="replica=2").points()} == {1}


def test_of_many_devices_zero_divides_within_nodes_or_a_few_of_them() -> None:
    assert shard_sizes(8, inside=1, devices=8, node=8) == [8, 4, 2]
    assert shard_sizes(1024, inside=1, devices=1024, node=8) == [1024, 32, 16, 8]
    assert shard_sizes(512, inside=2, devices=1024, node=8) == [512, 16, 8, 4]
    assert shard_sizes(128, inside=8, devices=16384, node=8) == [128, 8, 4, 2]
    assert shard_sizes(2, inside=1, devices=64, node=8) == [2]


def test_mesh_with_replicas_is_planned_as_it_is_asked_for() -> None:
    plan = plan_auto(
        program(),
        Mesh(replica=2, data=2),
        cluster=CLUSTER,
        options=AutoOptions(simulate=4, propose=False),
    )
    assert (plan.mesh["replica"], plan.mesh["data"]) == (2, 2)
    assert plan.zero > 0
    assert point_of(plan).replica == 2


def test_grid_of_axonn_counts_as_shards_of_replicas() -> None:
    plan = Plan(mesh={"data": 2, "z": 4, "y": 1, "x": 2})
    found = point_of(plan)
    assert (found.replica, found.data, found.zero, found.tensor) == (2, 4, 3, 2)
    assert not Constraints.parse("", "zero=3").allows(found)
