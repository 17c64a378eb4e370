"""A plan with stages or ZeRO, simulated: time, bubble, communication and memory of each stage."""

from __future__ import annotations

from dataclasses import replace

from shardweave.ir.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.pipeline.events import StageTimes, Waits, play
from shardweave.planners.cost.pipeline.order import most_in_flight
from shardweave.planners.cost.pipeline.result import PipelineSimulation, StageResult
from shardweave.planners.cost.pipeline.stages import (
    Stage,
    between,
    inside_totals,
    pipeline_of,
    stages_of,
)
from shardweave.planners.lower import Lowerings
from shardweave.planners.plan import Plan


def simulate_stages(
    lowerings: Lowerings,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer_multiplier: float | None = None,
) -> PipelineSimulation:
    """Simulate a step of a global program under a plan with stages, ZeRO, or neither.

    A replica of each stage stands for all, and micro-batches are its events. optimizer_multiplier:
    bytes of optimizer state per byte of parameters; None: Adam's in the plan's precision. Time: a
    partition, and O(stages x micro-batches) events, by block where parameters are gathered or
    gradients scattered. Raises ValueError (PlanError, ClusterError) if the plan does not fit the
    program or cluster.
    """
    stages = stages_of(lowerings, plan, cluster)
    times = _with_messages(cluster, stages)
    pipeline = pipeline_of(plan)
    orders = [stage.tasks for stage in stages]
    played = play(times, orders, cluster.overlap_slowdown, cluster.link_slowdown)
    results = [
        _result(stage, waits, optimizer_multiplier)
        for stage, waits in zip(stages, played.waits, strict=True)
    ]
    return PipelineSimulation(
        cluster=cluster,
        mesh=Mesh(**plan.mesh),
        schedule=pipeline.schedule,
        micro_batches=pipeline.micro_batches,
        time_s=played.time_s,
        lower_bound_s=lower_bound(times, pipeline.micro_batches),
        stages=tuple(results),
        events=played.events,
    )


def _with_messages(cluster: Cluster, stages: list[Stage]) -> list[StageTimes]:
    found = [stage.times for stage in stages]
    for number, (forward, back) in enumerate(between(cluster, stages)):
        found[number] = replace(found[number], to_next=forward)
        found[number + 1] = replace(found[number + 1], to_previous=back)
    return found


def lower_bound(times: list[StageTimes], micro_batches: int) -> float:
    """A stage runs all micro-batches, after the first reached it and before the last went back."""
    each = [sum(part.seconds for part in (*stage.forward, *stage.last_backward)) for stage in times]
    before = [sum(each[:number]) for number in range(len(each))]
    return max(micro_batches * own + first for own, first in zip(each, before, strict=True))


def _result(stage: Stage, waits: Waits, optimizer_multiplier: float | None) -> StageResult:
    count = pipeline_of(stage.plan).micro_batches
    exposed = {axes: seconds for axes, seconds in waits.exposed_s.items() if seconds}
    inside = inside_totals(stage)
    spent = [
        stage.exposed_s(block, is_forward=is_forward)
        for block in stage.blocks
        for is_forward in (True, False)
    ]
    alone_s, lost_s = (sum(row) for row in zip(*spent, strict=True))
    total = sum(inside.values())
    for axes, seconds in inside.items():
        exposed[axes] = exposed.get(axes, 0.0) + count * alone_s * (
            seconds / total if total else 0.0
        )
    compute_s = stage.compute_s(is_forward=True) + stage.compute_s(is_forward=False)
    sent = {axes: seconds for axes, seconds in waits.sent_s.items() if seconds}
    return StageResult(
        compute_s=count * compute_s,
        slowdown_s=waits.slowdown_s + count * lost_s,
        communication_s={**inside, **sent},
        exposed_s=exposed,
        bubble_s=waits.bubble_s,
        memory_parts=stage.memory_bytes(optimizer_multiplier),
        memory_bytes=stage.capacity_bytes,
        in_flight=most_in_flight(stage.tasks),
    )
