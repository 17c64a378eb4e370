"""A simulated step over time: its events, a trace of them for Perfetto, and a picture."""

# matplotlib's methods take any further keywords, which pyright calls unknown.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardweave.ir.dialects.attributes import PHASES
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import seconds_text
from shardweave.planners.simulate.update_cost import UpdateCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = "compute"

PHASE_COLOURS = {
    "forward": "#4c78a8",
    "recompute": "#9ecae9",
    "backward": "#f58518",
    "optimizer": "#54a24b",
}
_OTHER_COLOUR = "#b0b0b0"
_RESOLUTION = 1000
"""Number of intervals into which a plot can divide the step's time."""

_MANY_BARS = 300


class Event(NamedTuple):
    """One op on a stream: `compute`, or the axes of a collective, such as `data,tensor`."""

    name: str
    layer: str
    phase: str
    copy: tuple[int, ...]
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step, in seconds. lower_bound_s: time that no order of the same work can beat.

    time_s: without the optimizer's update, which follows. update: None if it is not simulated.
    """

    cluster: Cluster
    mesh: Mesh
    time_s: float
    lower_bound_s: float
    events: tuple[Event, ...] = field(repr=False)
    update: UpdateCost | None = field(default=None, kw_only=True)

    @property
    def ratio(self) -> float:
        """The step's time divided by its lower bound."""
        return self.time_s / self.lower_bound_s if self.lower_bound_s else 1.0

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer's update; 0 if it is not simulated."""
        return 0.0 if self.update is None else self.update.seconds

    @property
    def step_s(self) -> float:
        """Seconds of the step with the update."""
        return self.time_s + self.update_s

    def headline(self) -> str:
        """The first line of a summary: seconds, mesh and devices."""
        cluster, mesh = self.cluster, self.mesh
        devices = f"{mesh.num_devices} of {cluster.num_devices} devices of {cluster.name}"
        return f"iteration      {seconds_text(self.step_s)} on mesh {mesh}, {devices}"

    def update_lines(self) -> list[str]:
        """Return the summary's line about the update, if one was simulated, else nothing."""
        if self.update is None:
            return []
        return [f"update         {self.update.line()}; {seconds_text(self.time_s)} without it"]

    def record(self) -> dict[str, Any]:
        """The numbers of a step as JSON data."""
        return {
            "cluster": self.cluster.name,
            "mesh": {axis.name: axis.size for axis in self.mesh.axes},
            "time_s": self.step_s,
            "lower_bound_s": self.lower_bound_s,
            "ratio": self.ratio,
            **({} if self.update is None else {"update": self.update.record()}),
        }

    def save_trace(self, path: str | Path) -> None:
        """Write Chrome's trace format (JSON) for ui.perfetto.dev; times in microseconds."""
        rows = {name: index for index, name in enumerate(stream_names(self.events))}
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
            for event in self.events
        ]
        Path(path).write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))

    def plot(self, path: str | Path) -> None:
        """Draw one row per stream over time, coloured by phase, to a file that matplotlib knows.
        Ops of every second copy (sub-batch) are hatched. Raises ValueError without matplotlib."""
        streams = stream_names(self.events)
        figure = new_figure(14, 1.7 + 0.7 * len(streams))
        from matplotlib.patches import Patch

        axes = figure.add_subplot()
        for row, stream in enumerate(streams):
            bars = bars_of([e for e in self.events if e.stream == stream], self.time_s)
            for (phase, is_odd), spans in bars.items():
                axes.broken_barh(
                    spans,
                    (row - 0.4, 0.8),
                    facecolors=colour_of(phase),
                    edgecolor="white",
                    hatch="////" if is_odd else None,
                    linewidth=0.0 if len(spans) > _MANY_BARS else 0.4,
                )
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis()
        axes.set_xlim(0, self.time_s * 1e3 or 1)
        axes.set_xlabel("time (ms)")
        axes.axvline(self.lower_bound_s * 1e3, color="black", linestyle=":", linewidth=1.2)
        phases = [phase for phase in PHASES if any(e.phase == phase for e in self.events)]
        handles = [Patch(color=colour_of(phase), label=phase) for phase in phases]
        if any(_is_odd(event) for event in self.events):
            handles.append(
                Patch(facecolor="#777777", edgecolor="white", hatch="////", label="second copy")
            )
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        axes.set_title(
            f"{self.cluster.name}, mesh {self.mesh}: {seconds_text(self.time_s)}, "
            f"{self.ratio:.2f} x the lower bound (dotted)"
        )
        figure.savefig(path, dpi=120)


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure; sizes in inches. Raises ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "drawing needs matplotlib, which is not installed; install shardweave with its extra "
            "'plot': pip install 'shardweave[plot]'."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def stream_names(events: Iterable[Event]) -> list[str]:
    """The streams in order: compute, then the communication streams by name."""
    names = {event.stream for event in events}
    return sorted(names, key=lambda name: (name != COMPUTE, name))


def colour_of(phase: str) -> str:
    return PHASE_COLOURS.get(phase, _OTHER_COLOUR)


def _is_odd(event: Event) -> bool:
    return sum(event.copy) % 2 == 1


def bars_of(
    events: list[Event], total_s: float
) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """Make (start, length) of bars in milliseconds, by phase and sub-batch; joins tiny bars."""
    least_s = total_s / _RESOLUTION
    joined: list[tuple[tuple[str, bool], float, float]] = []
    for event in events:
        key = (event.phase, _is_odd(event))
        if joined:
            last, start_s, end_s = joined[-1]
            is_small = min(event.end_s - event.start_s, end_s - start_s) < 4 * least_s
            if last == key and event.start_s - end_s < least_s and is_small:
                joined[-1] = (key, start_s, event.end_s)
                continue
        joined.append((key, event.start_s, event.end_s))
    bars: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for key, start_s, end_s in joined:
        bars.setdefault(key, []).append((start_s * 1e3, (end_s - start_s) * 1e3))
    return bars
