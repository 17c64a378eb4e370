"""Schedule `list` on programs: fewer bubbles than the other schedules, within the memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from xdsl.ir import SSAValue

from shardweave.ir.dialects.dist import RecvOp, SendOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import StageFunction, functions_of, runs_of
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.lowering.stages.list_stages import order_stages, stage_costs_of
from shardweave.planners.lowering.stages.picture import picture_of, schedule_table_of
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.predict.predict import simulate_step
from shardweave.planners.schedules.schedules import fixed_tables
from shardweave.tests.zoo import captured

SMALL = "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=8,batch=8"
LARGE = "gpt:layers=8,hidden=512,heads=8,vocab=256,seq=128,batch=16,tie=false"
CLUSTER = "h100-pod"


@cache
def staged(spec: str, schedule: str, chunks: int = 1) -> Program:
    program = captured(spec).program
    stages = balanced_stages(program, 4 * chunks)
    plan = replace(
        plan_megatron(program, Mesh(stage=4)),
        pipeline=Pipeline(stages, 8, schedule=schedule),
        cluster=CLUSTER if schedule == "list" else "",
    )
    return local_program(program, plan)


def simulated(program: Program, cluster: Cluster | str = CLUSTER) -> PipelineSimulation:
    found = simulate_step(program, cluster, optimizer_multiplier=None)
    assert isinstance(found, PipelineSimulation)
    return found


def test_list_is_the_fastest_and_its_picture_shows_each_pass() -> None:
    found = staged(SMALL, "list")
    time_s = simulated(found).time_s
    assert all(time_s <= simulated(staged(SMALL, name)).time_s for name in ("1f1b", "zero-bubble"))
    picture = picture_of(*schedule_table_of(found))
    assert all(picture.count(f"{kind}7") == times for kind, times in (("F", 4), ("I", 3), ("W", 3)))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zero-bubble-v"])
def test_what_is_sent_to_two_stages_of_a_rank_arrives_at_each(schedule: str) -> None:
    found = simulated(staged(SMALL, schedule, 2))
    assert found.time_s > max(stage.compute_s for stage in found.stages)
    sent = sum(stage.communication_s["stage"] for stage in found.stages)
    assert sent > sum(
        one.communication_s["stage"] for one in simulated(staged(SMALL, "gpipe")).stages
    )


def test_both_ends_of_a_message_spend_what_the_cluster_says() -> None:
    program, functions = staged(SMALL, "gpipe"), functions_of(staged(SMALL, "gpipe"))
    free = replace(find_cluster(CLUSTER), start_overhead_s=0.0)
    priced = replace(free, message_overhead_s=1e-3, message_bandwidth_bytes_s=1e6)
    sizes = [
        num_bytes(tensor_type_of(op.operands[0]))
        for run in runs_of(program)
        for op in functions[run.function].ops
        if isinstance(op, SendOp)
    ]
    spent_s = sum(
        more.compute_s - less.compute_s
        for more, less in zip(
            simulated(program, priced).stages, simulated(program, free).stages, strict=True
        )
    )
    assert len(sizes) >= 2 * 3 * 8
    assert spent_s == pytest.approx(2 * sum(1e-3 + size / 1e6 for size in sizes))
    last_s = [stage_costs_of(program, cluster).pass_s((3, 3), "F") for cluster in (priced, free)]
    hidden = num_bytes(tensor_type_of(_received(functions["forward_3"])))
    assert last_s[0] - last_s[1] == pytest.approx(1e-3 + hidden / 1e6)


def _received(function: StageFunction) -> SSAValue:
    """The only value that a function receives."""
    (found,) = (op.results[0] for op in function.ops if isinstance(op, RecvOp))
    return found


def test_less_memory_gives_an_order_with_fewer_micro_batches_in_flight_or_none() -> None:
    program = staged(SMALL, "list").clone()
    before = simulated(program)
    others = fixed_tables(4, 8, 1)
    cluster = find_cluster(CLUSTER)

    def order(memory_bytes: float) -> None:
        (device,) = cluster.devices.values()
        small = replace(device, memory_bytes=int(memory_bytes))
        order_stages(program, replace(cluster, devices={device.name: small}), others)

    fixed = simulated(staged(SMALL, "zero-bubble"))
    most, least = (max(s.peak_bytes for s in found.stages) for found in (before, fixed))
    assert least < most
    limit = (most + least) / 2
    order(limit)
    after = simulated(program)
    assert max(stage.peak_bytes for stage in after.stages) <= limit
    assert after.time_s >= before.time_s
    with pytest.raises(ValueError, match="on 4 ranks fits into their memory"):
        order(0.1 * least)


@pytest.mark.slow
def test_bubbles_are_a_third_of_those_of_1f1b_and_a_tenth_on_two_chunks() -> None:
    fixed = simulated(staged(LARGE, "1f1b"))
    found = simulated(staged(LARGE, "list"))
    # The last stage has nothing to do before the first micro-batch has come through the others.
    first = min(e.start_s for e in found.events if e.stream == "stage 03" and e.copy)
    assert found.bubble_s == pytest.approx(first, rel=0.02)
    assert found.bubble_s < 0.36 * fixed.bubble_s
    assert simulated(staged(LARGE, "list", 2)).bubble_s < fixed.bubble_s / 3
    assert simulated(staged(LARGE, "zero-bubble-v", 2)).bubble_s < fixed.bubble_s / 3
