"""A plan with stages or ZeRO, simulated: time, bubble, communication and memory of each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import memory_text, seconds_text
from shardweave.planners.cost.workload import Workload
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.plan.plan import Plan
from shardweave.planners.predict.pipeline.events import (
    PIPELINE_AXIS,
    Message,
    StageTimes,
    TaskPart,
    Waits,
    most_in_flight,
    play,
)
from shardweave.planners.predict.pipeline.stages import (
    Stage,
    between,
    inside_totals,
    memory_of,
    message_work,
    pipeline_of,
    places_of,
    stages_of,
)
from shardweave.planners.simulate.timeline import Timeline


@dataclass(frozen=True)
class StageResult:
    """One stage of a step, in seconds and bytes of one of its devices.

    The step takes compute_s + slowdown_s + exposed_communication_s + bubble_s: slowdown_s is what
    compute loses to communication beside it, bubble_s waiting for other stages. communication_s,
    exposed_s: by axes; `pipeline` is what the stage receives. in_flight: micro-batches whose
    activations it holds at once.
    """

    compute_s: float
    slowdown_s: float
    communication_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    bubble_s: float
    memory_parts: Mapping[str, float]
    memory_bytes: int
    in_flight: int

    @property
    def exposed_communication_s(self) -> float:
        return sum(self.exposed_s.values())

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_parts.values())


@dataclass(frozen=True)
class PipelineSimulation(Timeline):
    """One step of a plan on a cluster, in seconds; `stages` says what each does.

    lower_bound_s: no order of the micro-batches beats it, were messages between stages free.
    """

    schedule: str
    micro_batches: int
    stages: tuple[StageResult, ...]

    @property
    def busiest(self) -> StageResult:
        """The stage that waits least for others."""
        return min(self.stages, key=lambda stage: stage.bubble_s)

    @property
    def fullest(self) -> StageResult:
        """The stage that takes the largest share of its devices' memory."""
        return max(self.stages, key=lambda stage: stage.peak_bytes / stage.memory_bytes)

    @property
    def bubble_s(self) -> float:
        """Of the busiest stage."""
        return self.busiest.bubble_s

    @property
    def exposed_communication_s(self) -> float:
        """Of the busiest stage."""
        return self.busiest.exposed_communication_s

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return self.fullest.peak_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the fullest stage's smallest device."""
        return self.fullest.memory_bytes

    def summary(self) -> str:
        """The step, and a line for each stage."""
        waits = f"{self.bubble_s / (self.time_s or 1.0):.0%}"
        counts = f"{len(self.stages)} stages, {self.micro_batches} micro-batches, {self.schedule}"
        lines = [
            self.headline(),
            f"pipeline       {counts}; the busiest stage waits {waits} of the step for others",
            f"lower bound    {seconds_text(self.lower_bound_s)} with free messages between stages",
            f"ratio          {self.ratio:.3f} of the lower bound",
        ]
        lines += (_line(number, stage) for number, stage in enumerate(self.stages))
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The numbers of a simulation as JSON data."""
        return super().record() | {
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "bubble_s": self.bubble_s,
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.memory_bytes,
            "stages": [asdict(stage) | {"peak_bytes": stage.peak_bytes} for stage in self.stages],
        }


def _line(number: int, stage: StageResult) -> str:
    exposed = ", ".join(f"{axes} {seconds_text(t)}" for axes, t in stage.exposed_s.items() if t)
    return (
        f"stage {number:<9}compute {seconds_text(stage.compute_s + stage.slowdown_s)}, exposed "
        f"{seconds_text(stage.exposed_communication_s)}{f' ({exposed})' if exposed else ''}, "
        f"bubble {seconds_text(stage.bubble_s)}; memory "
        f"{memory_text(stage.peak_bytes, stage.memory_bytes)}, {stage.in_flight} in flight"
    )


def simulate_stages(
    lowerings: Lowerings,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer_multiplier: float | None = None,
    deepened: Callable[[Workload], Workload] | None = None,
) -> PipelineSimulation:
    """Simulate a step of a global program under a plan with stages, ZeRO, or neither.

    A replica of each stage stands for all, and micro-batches are its events. optimizer_multiplier:
    bytes of optimizer state per byte of parameters; None: Adam's in the plan's precision.
    deepened: as for `stages_of`. Time: a partition, and O(stages x micro-batches) events, by block
    where parameters are gathered or gradients scattered. Raises ValueError (PlanError,
    ClusterError) if the plan does not fit the program or cluster.
    """
    stages = stages_of(lowerings, plan, cluster, deepened)
    return played_stages(stages, plan, cluster, optimizer_multiplier=optimizer_multiplier)


def played_stages(
    stages: list[Stage],
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer_multiplier: float | None = None,
    gathers: bool = False,
    blocking: bool = False,
) -> PipelineSimulation:
    """A step of stages whose blocks are known; see `simulate_stages`.

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
