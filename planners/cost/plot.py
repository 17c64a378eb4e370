"""A picture of a simulated step: its streams over time, coloured by phase."""

# matplotlib's methods take any further keywords, which pyright calls unknown.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

from shardweave.ir.attributes import PHASES
from shardweave.planners.cost.timeline import Event, Timeline, seconds_text, stream_names

PHASE_COLOURS = {
    "forward": "#4c78a8",
    "recompute": "#9ecae9",
    "backward": "#f58518",
    "optimizer": "#54a24b",
}
_OTHER_COLOUR = "#b0b0b0"
_RESOLUTION = 1000
"""Parts of the step's time that can be seen apart in a plot."""

_MANY_BARS = 300


def plot(simulation: Timeline, path: str | Path) -> None:
    """Draw one row per stream over time, coloured by phase, to a file that matplotlib knows.

    Ops of every second copy (sub-batch) are hatched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    streams = stream_names(simulation.events)
    figure = Figure(figsize=(14, 1.7 + 0.7 * len(streams)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, stream in enumerate(streams):
        bars = bars_of([event for event in simulation.events if event.stream == stream], simulation)
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
    axes.set_xlim(0, simulation.time_s * 1e3 or 1)
    axes.set_xlabel("time (ms)")
    axes.axvline(simulation.lower_bound_s * 1e3, color="black", linestyle=":", linewidth=1.2)
    phases = [phase for phase in PHASES if any(e.phase == phase for e in simulation.events)]
    handles = [Patch(color=colour_of(phase), label=phase) for phase in phases]
    if any(_is_odd(event) for event in simulation.events):
        handles.append(
            Patch(facecolor="#777777", edgecolor="white", hatch="////", label="second copy")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    axes.set_title(
        f"{simulation.cluster.name}, mesh {simulation.mesh}: {seconds_text(simulation.time_s)}, "
        f"{simulation.ratio:.2f} x the lower bound (dotted)"
    )
    figure.savefig(path, dpi=120)


def colour_of(phase: str) -> str:
    """The colour of a phase in plots."""
    return PHASE_COLOURS.get(phase, _OTHER_COLOUR)


def _is_odd(event: Event) -> bool:
    return sum(event.copy) % 2 == 1


def bars_of(
    events: list[Event], simulation: Timeline
) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """(start, length) in milliseconds by phase and copy; neighbours too small to see are joined."""
    least_s = simulation.time_s / _RESOLUTION
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
