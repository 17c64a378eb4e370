"""A simulated step of one rank: seconds and bytes, with output as text, JSON and a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardweave.planners.cost.memory import Memory
from shardweave.planners.cost.quantity import bytes_text, memory_text, seconds_text
from shardweave.planners.simulate.timeline import Timeline

Axes = tuple[str, ...]


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds, in seconds, on the step's time in any order of its ops.

    compute_s: sum over all ops, without slowdown. link_s: time that each link is in use.
    critical_path_s: the longest chain of dependent ops.
    """

    compute_s: float
    link_s: Mapping[str, float]
    critical_path_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.critical_path_s, *self.link_s.values(), 0.0)


@dataclass(frozen=True)
class Simulation(Timeline):
    """One step of a program on a cluster, in seconds and bytes of one rank.

    time_s = compute_s + slowdown_s + host_s + exposed_communication_s: ops at full speed, the time
    that they lose to concurrent communication, and the idle time of the compute stream while it
    waits for the host to issue an op, and for a collective. communication_s, exposed_s: by mesh
    axes. op_end_s: time at which the compute stream has finished each op of the program.
    """

    compute_s: float
    slowdown_s: float
    host_s: float
    communication_s: Mapping[Axes, float]
    exposed_s: Mapping[Axes, float]
    bound: LowerBound
    memory: Memory
    op_end_s: tuple[float, ...] = field(repr=False)

    @property
    def exposed_communication_s(self) -> float:
        """Seconds that the compute stream waits for collectives, over all axes."""
        return sum(self.exposed_s.values())

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a device in bytes."""
        return self.memory.peak_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes of the smallest device in use."""
        return min(d.memory_bytes for d in self.cluster.device_types(self.mesh.num_devices))

    def summary(self) -> str:
        """Return a few lines of text: the time by part, the lower bound, and the memory."""
        bound = self.bound
        total = self.time_s or 1.0
        lost_s = seconds_text(self.slowdown_s)
        lost = f", and {lost_s} lost beside communication" if self.slowdown_s else ""
        lines = [
            self.headline(),
            f"compute        {seconds_text(self.compute_s)} ({self.compute_s / total:.0%}){lost}",
        ]
        if self.host_s:
            waits = f"{seconds_text(self.host_s)} ({self.host_s / total:.0%})"
            lines.append(f"host           {waits} of waiting for ops to be issued")
        for axes, seconds in sorted(self.communication_s.items()):
            exposed_s = self.exposed_s.get(axes, 0.0)
            lines.append(
                f"communication  {seconds_text(seconds)} over {', '.join(axes)}, of which "
                f"{seconds_text(exposed_s)} exposed ({exposed_s / total:.0%} of the step)"
            )
        links = [f"link '{name}' {seconds_text(seconds)}" for name, seconds in bound.link_s.items()]
        parts = [f"compute {seconds_text(bound.compute_s)}", *links]
        parts.append(f"critical path {seconds_text(bound.critical_path_s)}")
        lines.append(
            f"lower bound    {seconds_text(bound.seconds)} (the largest of {', '.join(parts)})"
        )
        lines.append(f"ratio          {self.ratio:.3f} of the lower bound")
        kinds = [f"{part} {bytes_text(size)}" for part, size in self.memory.parts.items() if size]
        memory = memory_text(self.peak_bytes, self.memory_bytes)
        lines.append(f"peak memory    {memory} ({', '.join(kinds)})")
        if self.memory.host_bytes:
            lines.append(f"host memory    {bytes_text(self.memory.host_bytes)} of offloaded values")
        return "\n".join([*lines, *self.update_lines()])

    def record(self) -> dict[str, Any]:
        """The simulation's numbers as JSON data; keys by mesh axes join these with commas."""
        return super().record() | {
            "compute_s": self.compute_s,
            "slowdown_s": self.slowdown_s,
            "host_s": self.host_s,
            "communication_s": {",".join(axes): t for axes, t in self.communication_s.items()},
            "exposed_communication_s": self.exposed_communication_s,
            "exposed_s": {",".join(axes): t for axes, t in self.exposed_s.items()},
            "bound": asdict(self.bound),
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.memory_bytes,
            "memory_parts": dict(self.memory.parts),
            "host_memory_bytes": self.memory.host_bytes,
        }
