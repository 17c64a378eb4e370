"""A simulated step for people and other programs: a summary, JSON, a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardweave.ir.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster

if TYPE_CHECKING:
    from shardweave.planners.cost.simulate import Event, Simulation


class Timeline(Protocol):
    """What a trace and a picture are made from: a simulated step, of one rank or of all stages."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def time_s(self) -> float: ...

    @property
    def lower_bound_s(self) -> float: ...

    @property
    def ratio(self) -> float: ...

    @property
    def events(self) -> tuple[Event, ...]: ...


def summary(simulation: Simulation) -> str:
    """A few lines: time and what it is made of, the bound, the memory."""
    s, bound = simulation, simulation.bound
    total = s.time_s or 1.0
    devices = f"{s.mesh.num_devices} of {s.cluster.num_devices} devices of {s.cluster.name}"
    lines = [
        f"iteration      {seconds_text(s.time_s)} on mesh {s.mesh}, {devices}",
        f"compute        {seconds_text(s.compute_s)} ({s.compute_s / total:.0%})"
        + (f", and {seconds_text(s.slowdown_s)} lost beside communication" if s.slowdown_s else ""),
    ]
    for axes, seconds in sorted(s.communication_s.items()):
        exposed_s = s.exposed_s.get(axes, 0.0)
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
    lines.append(f"ratio          {s.ratio:.3f} of the lower bound")
    kinds = [f"{part} {bytes_text(size)}" for part, size in s.memory.parts.items() if size]
    over = " - MORE THAN THE DEVICE HAS" if s.peak_bytes > s.memory_bytes else ""
    lines.append(
        f"peak memory    {bytes_text(s.peak_bytes)} of {bytes_text(s.memory_bytes)}{over} "
        f"({', '.join(kinds)})"
    )
    return "\n".join(lines)


def record(simulation: Simulation) -> dict[str, Any]:
    """The numbers of a simulation as JSON data; axes are joined by commas."""
    s = simulation
    return {
        "cluster": s.cluster.name,
        "mesh": {axis.name: axis.size for axis in s.mesh.axes},
        "time_s": s.time_s,
        "compute_s": s.compute_s,
        "slowdown_s": s.slowdown_s,
        "communication_s": {",".join(axes): t for axes, t in s.communication_s.items()},
        "exposed_communication_s": s.exposed_communication_s,
        "exposed_s": {",".join(axes): t for axes, t in s.exposed_s.items()},
        "lower_bound_s": s.lower_bound_s,
        "bound": {
            "compute_s": s.bound.compute_s,
            "link_s": dict(s.bound.link_s),
            "critical_path_s": s.bound.critical_path_s,
        },
        "ratio": s.ratio,
        "peak_bytes": s.peak_bytes,
        "memory_bytes": s.memory_bytes,
        "memory_parts": dict(s.memory.parts),
    }


def seconds_text(seconds: float) -> str:
    """0.0123 -> `12.30 ms`."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.3f} s"


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def stream_names(events: Iterable[Event]) -> list[str]:
    """The streams in order: compute first, then those of communication by name."""
    names = {event.stream for event in events}
    return sorted(names, key=lambda name: (name != "compute", name))


def save_trace(simulation: Timeline, path: str | Path) -> None:
    """Write Chrome's trace format (JSON), which ui.perfetto.dev reads; times in microseconds."""
    rows = {name: index for index, name in enumerate(stream_names(simulation.events))}
    records: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        for name, row in rows.items()
    ]
    records += [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows[event.stream],
            "name": event.name,
            "cat": event.phase,
            "ts": event.start_s * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
            "args": {"layer": event.layer, "phase": event.phase, "copy": list(event.copy)},
        }
        for event in simulation.events
    ]
    Path(path).write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))
