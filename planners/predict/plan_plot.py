"""Bar charts that compare plans: time by part, memory by part."""

# matplotlib's methods take any further keywords, which pyright calls unknown.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardweave.planners.cost.quantity import GIB
from shardweave.planners.plan.plan_parts import Candidate
from shardweave.planners.predict.predict import time_parts
from shardweave.planners.simulate.timeline import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_candidates(rows: Sequence[Candidate], path: str | Path) -> None:
    """Draw bars of each plan's milliseconds and GiB to a file; ValueError without matplotlib."""
    if not rows:
        raise ValueError("no plan has a predicted step time to draw; plan for a cluster.")
    figure = new_figure(13, 1.8 + 0.5 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row.name for row in rows]
    _bars(left, names, [time_parts(row.predicted) for row in rows], 1e3)
    left.set_xlabel("time of a step (ms)")
    right.set_xlabel("memory of a device (GiB)")
    for size in {row.predicted.capacity_bytes for row in rows} - {0.0}:
        right.axvline(size / GIB, color="black", linestyle="--", label="the device has")
    _bars(right, names, [row.predicted.memory_bytes for row in rows], 1 / GIB)
    left.invert_yaxis()
    figure.savefig(path, dpi=120)


def _bars(
    axes: Axes, names: Sequence[str], rows: Sequence[Mapping[str, float]], scale: float
) -> None:
    offsets = [0.0] * len(rows)
    for part in dict.fromkeys(part for row in rows for part in row):
        widths = [scale * row.get(part, 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=offsets, label=part)
        offsets = [sum(pair) for pair in zip(offsets, widths, strict=True)]
    axes.set_yticks(range(len(rows)), names)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4, fontsize="small")
