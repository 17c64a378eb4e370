"""Simulated steps with stages or micro-batches: time, communication and memory by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardweave.planners.cost.quantity import memory_text, seconds_text
from shardweave.planners.simulate.timeline import Timeline


@dataclass(frozen=True)
class StageResult:
    """Results of one coordinate of the stage axis, in seconds and bytes of one of its devices.

    The step takes compute_s + slowdown_s + exposed_communication_s + bubble_s. slowdown_s: slowdown
    of compute by concurrent communication. bubble_s: waiting for other stages. communication_s,
    exposed_s: by axes; `stage` is for the messages that it receives. memory_bytes: capacity of its
    smallest device. in_flight: most micro-batches whose activations it holds at once.
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
    """Simulation of a plan's step on a cluster, in seconds. stages: results by coordinate.

    lower_bound_s: for any order of micro-batches, if messages between stages took no time.
    """

    schedule: str
    micro_batches: int
    stages: tuple[StageResult, ...]

    @property
    def busiest(self) -> StageResult:
        """The stage with the smallest bubble."""
        return min(self.stages, key=lambda stage: stage.bubble_s)

    @property
    def fullest(self) -> StageResult:
        """The stage that takes the largest share of its devices' memory."""
        return max(self.stages, key=lambda stage: stage.peak_bytes / stage.memory_bytes)

    @property
    def bubble_s(self) -> float:
        """Bubble of the busiest stage, in seconds."""
        return self.busiest.bubble_s

    @property
    def exposed_communication_s(self) -> float:
        """Exposed communication of the busiest stage, in seconds."""
        return self.busiest.exposed_communication_s

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of the fullest stage."""
        return self.fullest.peak_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory of the fullest stage's smallest device, in bytes."""
        return self.fullest.memory_bytes

    def summary(self) -> str:
        """Describe the step, with a line for each stage."""
        waits = f"{self.bubble_s / (self.time_s or 1.0):.0%}"
        counts = f"{len(self.stages)} stages, {self.micro_batches} micro-batches, {self.schedule}"
        lines = [
            self.headline(),
            f"pipeline       {counts}; the busiest stage waits {waits} of the step for others",
            f"lower bound    {seconds_text(self.lower_bound_s)} with free messages between stages",
            f"ratio          {self.ratio:.3f} of the lower bound",
        ]
        lines += (_line(number, stage) for number, stage in enumerate(self.stages))
        return "\n".join([*lines, *self.update_lines()])

    def record(self) -> dict[str, Any]:
        """Return the simulation's numbers as JSON data."""
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
