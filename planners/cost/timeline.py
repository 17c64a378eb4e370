"""The events of a simulated step, its trace for Perfetto, and how times and sizes are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shardweave.ir.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster

COMPUTE = "compute"


class Event(NamedTuple):
    """One op on one stream. stream: `compute`, or the axes of a collective, as `data,tensor`."""

    name: str
    layer: str
    phase: str
    copy: tuple[int, ...]
    stream: str
    start_s: float
    end_s: float


class Timeline(Protocol):
    """A simulated step, of one rank or of all stages: a trace and a picture are made from it."""

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


def iteration_line(step: Timeline) -> str:
    """The first line of a summary: seconds, mesh and devices."""
    cluster, mesh = step.cluster, step.mesh
    devices = f"{mesh.num_devices} of {cluster.num_devices} devices of {cluster.name}"
    return f"iteration      {seconds_text(step.time_s)} on mesh {mesh}, {devices}"


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
    return sorted(names, key=lambda name: (name != COMPUTE, name))


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
