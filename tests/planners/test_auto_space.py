"""The joint space of `auto`: chunks, recomputation, and values that make no difference somewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.bubble_bounds import bubble_bound_s
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.auto.estimate import Estimator
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.planner import AutoOptions, joint_search, plan_auto
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.reader import CostReader, Depths
from shardweave.planners.auto.space.constraints import Constraints, point_of
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.call import call_planner
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import OFFLOAD, PlanError
from shardweave.tests.planners.small_clusters import with_dtype
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
    assert point_of(plan).chunks == 2
    assert not any("chunks" in one.name for one in plan.candidates)
    # Those of other orders are their schedules' own, and no choice.
    plan = planned(forbid="chunks=2,chunks=4", simulate=6)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule != "interleaved-1f1b"


SPARED = {
    "loss_chunks": ("gpt:layers=1,hidden=16,heads=2,vocab=512,seq=16,batch=8", "loss in"),
    "offload": ("gpt:layers=6,hidden=16,heads=2,vocab=16,seq=16,batch=8", "offload"),
}


@pytest.mark.parametrize("dimension", SPARED)
def test_memory_is_spared_where_it_keeps_the_fastest_plan_from_fitting(dimension: str) -> None:
    spec, words = SPARED[dimension]
    case = captured(spec)
    asked = "schedule=in-order,sub_batches=1,recompute=none,zero=0,micro_batches=1,stages=1"
    testbed = with_dtype(find_cluster("testbed:nodes=2"))
    near = {k: replace(d, host_bandwidth_bytes_s=5e9) for k, d in testbed.devices.items()}
    on = replace(testbed, devices=near)
    options = {"fix": asked, "propose": False, "simulate": 4}

    def planned_on(cluster: Cluster) -> Plan:
        return call_planner("auto", case.program, Mesh(data=2), cluster=cluster, options=options)

    whole = planned_on(on).predicted
    assert whole is not None
    options["memory"] = f"{int(0.8 * whole.peak_bytes)}B"
    plan = planned_on(on)
    assert getattr(plan, dimension) != getattr(Plan(), dimension)
    assert plan.predicted is not None
    assert plan.predicted.fits
    assert words in plan.candidates[0].name
    assert_equals_eager(partition(case.program, Mesh(**plan.mesh), plan), case)
    if dimension == "offload":
        assert any(reason.startswith("offload: none, ") for reason in plan.reasons)
        with pytest.raises(PlanError, match="no plan"):  # whose link to the host is not known
            planned_on(testbed)
    options["forbid"] = "loss_chunks=4,loss_chunks=16," + ",".join(
        f"offload={choice}" for choice in OFFLOAD[1:]
    )
    with pytest.raises(PlanError, match="no plan"):
        planned_on(on)


def test_search_is_exact_only_if_points_that_need_states_on_the_host_were_tried() -> None:
    """Other points fit without it."""
    case = captured("gpt:layers=2,hidden=64,heads=2,vocab=16,seq=16,batch=8")
    testbed = with_dtype(find_cluster("testbed:nodes=2"))
    near = {k: replace(d, host_bandwidth_bytes_s=5e10) for k, d in testbed.devices.items()}
    parameters = sum(parameter.numel() for parameter in case.example.module.parameters())
    options = AutoOptions(
        fix="micro_batches=1,zero=0,stages=1,sub_batches=1,recompute=layer",
        memory=f"{30 * parameters}B",
    )
    search = joint_search(case.program, None, replace(testbed, devices=near), options=options)
    search.run()
    assert search.best is not None
    others = [p for p in search.evaluator.simulated if p.offload != "none"]
    tried = {point.with_value(offload="none") for point in others}
    faster = [p for p, e in search.over.items() if e.bound_s < search.best[1].time_s]
    assert faster
    assert not search.is_exact or set(faster) <= tried
    assert tried & set(faster)
