"""A simulated pipeline for people and other programs: a summary and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardweave.planners.cost.pipeline.simulation import PipelineSimulation, StageResult
from shardweave.planners.cost.timeline import bytes_text, seconds_text


def summary(simulation: PipelineSimulation) -> str:
    """The step, and a line for each stage."""
    s = simulation
    devices = f"{s.mesh.num_devices} of {s.cluster.num_devices} devices of {s.cluster.name}"
    counts = f"{len(s.stages)} stages, {s.micro_batches} micro-batches, {s.schedule}"
    lines = [
        f"iteration      {seconds_text(s.time_s)} on mesh {s.mesh}, {devices}",
        f"pipeline       {counts}; the busiest stage waits {s.bubble_s / (s.time_s or 1.0):.0%} of "
        "the step for others",
        f"lower bound    {seconds_text(s.lower_bound_s)} with free messages between stages",
        f"ratio          {s.ratio:.3f} of the lower bound",
    ]
    lines += (_line(number, stage) for number, stage in enumerate(s.stages))
    return "\n".join(lines)


def _line(number: int, stage: StageResult) -> str:
    exposed = ", ".join(f"{axes} {seconds_text(t)}" for axes, t in stage.exposed_s.items() if t)
    over = " - MORE THAN THE DEVICE HAS" if stage.peak_bytes > stage.memory_bytes else ""
    return (
        f"stage {number:<9}compute {seconds_text(stage.compute_s + stage.slowdown_s)}, exposed "
        f"{seconds_text(stage.exposed_communication_s)}{f' ({exposed})' if exposed else ''}, "
        f"bubble {seconds_text(stage.bubble_s)}; memory {bytes_text(stage.peak_bytes)} of "
        f"{bytes_text(stage.memory_bytes)}{over}, {stage.in_flight} in flight"
    )


def record(simulation: PipelineSimulation) -> dict[str, Any]:
    """The numbers of a simulation as JSON data."""
    s = simulation
    return {
        "cluster": s.cluster.name,
        "mesh": {axis.name: axis.size for axis in s.mesh.axes},
        "schedule": s.schedule,
        "micro_batches": s.micro_batches,
        "time_s": s.time_s,
        "bubble_s": s.bubble_s,
        "lower_bound_s": s.lower_bound_s,
        "ratio": s.ratio,
        "peak_bytes": s.peak_bytes,
        "memory_bytes": s.memory_bytes,
        "stages": [asdict(stage) | {"peak_bytes": stage.peak_bytes} for stage in s.stages],
    }
