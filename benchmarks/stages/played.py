"""The step of other frameworks' runs: stages whose blocks are priced once, played by block.

Frameworks of which there is no program here are modelled so; a plan of ours is simulated by the
program that it lowers to (`planners/predict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardweave.benchmarks.stages.events import (
    PIPELINE_AXIS,
    Message,
    StageTimes,
    TaskPart,
    Waits,
    most_in_flight,
    play,
)
from shardweave.benchmarks.stages.stages import (
    Stage,
    between,
    inside_totals,
    memory_of,
    message_work,
    pipeline_of,
    places_of,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.plan.plan import Plan
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation, StageResult


def played_stages(
    stages: list[Stage],
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer_multiplier: float | None = None,
    gathers: bool = False,
    blocking: bool = False,
) -> PipelineSimulation:
    """A step of stages whose blocks are known.

    A replica of each stage stands for all, and micro-batches are its events.

    gathers: whether the ranks of a replica, which all have what is handed on, each send a share of
    it, and wait until they have gathered what they were handed. Else each sends all that it has, as
    the emitted program does. blocking: whether they wait until what they hand on is there. Those of
    Megatron-LM and DeepSpeed do both.
    """
    works = message_work(cluster, stages, gathers=gathers)
    times = _with_messages(stages, works, between(cluster, stages, gathers=gathers))
    pipeline = pipeline_of(plan)
    places = places_of(plan)
    orders = [stage.tasks for stage in stages[:places]]
    played = play(
        times,
        orders,
        cluster.overlap_slowdown,
        cluster.link_slowdown,
        cluster.slowdown_beside(is_inside=True),
        blocking=blocking,
    )
    results = [
        _result(stages[at::places], waits, sum(map(sum, works[at::places])), optimizer_multiplier)
        for at, waits in enumerate(played.waits)
    ]
    return PipelineSimulation(
        cluster=cluster,
        mesh=Mesh(**plan.mesh),
        schedule=pipeline.schedule,
        micro_batches=pipeline.micro_batches,
        time_s=played.time_s,
        lower_bound_s=lower_bound(
            [stage.times for stage in stages], pipeline.micro_batches, places
        ),
        stages=tuple(results),
        events=played.events,
    )


def _with_messages(
    stages: list[Stage],
    works: Sequence[tuple[float, float]],
    messages: Sequence[tuple[Message, Message]],
) -> list[StageTimes]:
    found = [_after(work_s, stage.times) for work_s, stage in zip(works, stages, strict=True)]
    for number, (forward, back) in enumerate(messages):
        found[number] = replace(found[number], to_next=forward)
        found[number + 1] = replace(found[number + 1], to_previous=back)
    return found


def _after(work_s: tuple[float, float], times: StageTimes) -> StageTimes:
    """The same, with work on messages before each pass, forward and backward."""
    ahead, back = ((TaskPart(seconds),) if seconds else () for seconds in work_s)
    return replace(
        times,
        forward=ahead + times.forward,
        backward=back + times.backward,
        last_backward=back + times.last_backward,
    )


def lower_bound(times: list[StageTimes], micro_batches: int, places: int) -> float:
    """A device runs all micro-batches through its stages, after the first reached it and before the
    last went back."""
    each = [sum(part.seconds for part in (*stage.forward, *stage.last_backward)) for stage in times]
    return max(micro_batches * sum(each[at::places]) + sum(each[:at]) for at in range(places))


def _result(
    chunks: Sequence[Stage], waits: Waits, work_s: float, optimizer_multiplier: float | None
) -> StageResult:
    """Of a device that has some stages, and spends `work_s` on messages of a micro-batch."""
    first = chunks[0]
    count = pipeline_of(first.plan).micro_batches
    exposed = {axes: seconds for axes, seconds in waits.exposed_s.items() if seconds}
    if work_s:
        exposed[PIPELINE_AXIS] = exposed.get(PIPELINE_AXIS, 0.0) + count * work_s
    inside = inside_totals(chunks)
    spent = [
        stage.exposed_s(block, is_forward=is_forward)
        for stage in chunks
        for block in stage.blocks
        for is_forward in (True, False)
    ]
    alone_s, lost_s = (sum(row) for row in zip(*spent, strict=True))
    total = sum(inside.values())
    for axes, seconds in inside.items():
        exposed[axes] = exposed.get(axes, 0.0) + count * alone_s * (
            seconds / total if total else 0.0
        )
    passes = [stage.compute_s(is_forward=way) for stage in chunks for way in (True, False)]
    sent = {axes: seconds for axes, seconds in waits.sent_s.items() if seconds}
    return StageResult(
        compute_s=count * sum(passes),
        slowdown_s=waits.slowdown_s + count * lost_s,
        communication_s={**inside, **sent},
        exposed_s=exposed,
        bubble_s=waits.bubble_s,
        memory_parts=memory_of(chunks, optimizer_multiplier),
        memory_bytes=first.capacity_bytes,
        in_flight=most_in_flight(first.tasks, [1] * len(chunks)),
    )
