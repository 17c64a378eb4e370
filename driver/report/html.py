"""Parts of a page: its style, without outside files; sections, tables, and tiles of numbers; the
streams of a simulated step over time, and its memory, as SVG that grows with the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from shardweave.ir.dialects.attributes import PHASES
from shardweave.ir.program.program import Program
from shardweave.planners.cost.memory import PARTS, memory_over_time
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.simulate.simulation import Simulation
from shardweave.planners.simulate.timeline import PHASE_COLOURS, Timeline, bars_of, stream_names

_PART_COLOURS = dict(
    zip(
        PARTS,
        ("#4c78a8", "#9d755d", "#e45756", "#bab0ac", "#72b7b2", "#f2a541", "#b279a2", "#54a24b"),
        strict=True,
    )
)
_DEVICE_COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#e4a5a0", "#9d755d", "#c7b042",
)  # fmt: skip


def _colours() -> str:
    rules = [
        f"rect.{name}, polygon.{name} {{ fill: {colour}; }} "
        f".legend i.{name} {{ background: {colour}; }}"
        for name, colour in {**PHASE_COLOURS, **_PART_COLOURS}.items()
    ]
    phases = " ".join(f"--{phase}: {colour};" for phase, colour in PHASE_COLOURS.items())
    rules.append(f":root {{ {phases} }}")
    rules += [f"rect.c{number} {{ fill: {c}; }}" for number, c in enumerate(_DEVICE_COLOURS)]
    return "\n".join(rules)


STYLE = f"{(Path(__file__).parent / 'report.css').read_text()}{_colours()}\n"


def document(title: str, body: str, *, more_style: str = "") -> str:
    """Make a page that needs no other file. more_style: CSS beside `STYLE`."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{more_style}</style></head><body>"
        f"{body}</body></html>\n"
    )


Cell = str | tuple[str]
"""Text, or (in a tuple) a number, which is right-aligned."""


def section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """Build a table that scrolls horizontally on narrow pages. Cells are text, not HTML."""

    def line(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{escape(cell[0])}</{tag}>'
            if isinstance(cell, tuple)
            else f"<{tag}>{escape(cell)}</{tag}>"
            for cell in cells
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{line(head, "th")}</tr>{body}</table></div>'


def tiles(numbers: Mapping[str, str], *, fits: bool) -> str:
    """Build tiles of numbers, by label. fits: False adds a warning that memory is too small."""
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in numbers.items()
    )
    warning = "" if fits else '<p class="warn">This needs more memory than the device has.</p>'
    return f'<section><div class="tiles">{cells}</div>{warning}</section>'


# A step over time

WIDTH = 1000
_ROW, _AREA = 26, 180
_NUM_POINTS = 500
"""Number of points of the memory picture; each shows the peak of its interval."""


def timeline_html(simulation: Timeline) -> str:
    """Draw a row for each stream, coloured by phase; every second sub-batch is hatched."""
    rows = [
        f'<div class="row"><span>{escape(stream)}</span>{_stream_svg(simulation, stream)}</div>'
        for stream in stream_names(simulation.events)
    ]
    phases = [phase for phase in PHASES if any(e.phase == phase for e in simulation.events)]
    legend = [f'<span><i class="{phase}"></i>{phase}</span>' for phase in phases]
    if any(sum(event.copy) % 2 for event in simulation.events):
        legend.append('<span><i class="hatch"></i>every second sub-batch</span>')
    return (
        _HATCH
        + "".join(rows)
        + _axis(simulation.time_s)
        + f'<p class="legend">{"".join(legend)}</p>'
    )


_HATCH = (
    '<svg width="0" height="0" class="defs" aria-hidden="true"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6" class="stripe"/></pattern></defs></svg>'
)


def _stream_svg(simulation: Timeline, stream: str) -> str:
    total_ms = simulation.time_s * 1e3 or 1.0
    events = [event for event in simulation.events if event.stream == stream]
    busy = seconds_text(sum(event.end_s - event.start_s for event in events))
    parts: list[str] = []
    for (phase, is_odd), spans in bars_of(events, simulation.time_s).items():
        for start_ms, length_ms in spans:
            x, width = start_ms / total_ms * WIDTH, max(length_ms / total_ms * WIDTH, 0.4)
            box = f'x="{x:.2f}" y="1" width="{width:.2f}" height="{_ROW - 2}"'
            said = f"{phase}, {seconds_text(length_ms / 1e3)} from {seconds_text(start_ms / 1e3)}"
            parts.append(f'<rect class="{phase}" {box}><title>{said}</title></rect>')
            if is_odd:
                parts.append(f'<rect class="hatch" {box}/>')
    return (
        f'<svg role="img" aria-label="stream {escape(stream, quote=True)}: busy for {busy}" '
        f'viewBox="0 0 {WIDTH} {_ROW}" preserveAspectRatio="none" height="{_ROW}">'
        + "".join(parts)
        + "</svg>"
    )


def _axis(total_s: float) -> str:
    marks = "".join(f"<span>{seconds_text(total_s * part / 4)}</span>" for part in range(5))
    return f'<div class="axis">{marks}</div>'


def memory_html(program: Program, simulation: Simulation) -> str:
    """Draw a program's memory over the time of its simulated step, stacked."""
    series = memory_over_time(program, simulation.memory.parts["optimizer"])
    points = _thinned([0.0, *simulation.op_end_s], series, simulation.time_s)
    peak = max((sum(parts.values()) for _, parts in points), default=0) or 1
    used = [part for part in PARTS if any(parts[part] for _, parts in points)]
    below = [0] * len(points)
    areas: list[str] = []
    for part in used:
        above = [base + parts[part] for base, (_, parts) in zip(below, points, strict=True)]
        areas.append(_area(part, [x for x, _ in points], below, above, peak))
        below = above
    legend = "".join(f'<span><i class="{part}"></i>{part}</span>' for part in used)
    return (
        f'<div class="area"><span class="top">{bytes_text(peak)}</span>'
        f'<svg role="img" aria-label="memory over time, at most {bytes_text(peak)}" '
        f'viewBox="0 0 {WIDTH} {_AREA}" preserveAspectRatio="none" height="{_AREA}">'
        + "".join(areas)
        + f"</svg></div>{_axis(simulation.time_s)}"
        + f'<p class="legend">{legend}</p>'
    )


def _thinned(
    times: Sequence[float], series: Sequence[Mapping[str, int]], total_s: float
) -> list[tuple[float, Mapping[str, int]]]:
    """Reduce to (x, bytes by part) per point: the op with the most memory in its interval."""
    parts_at: dict[int, Mapping[str, int]] = {}
    for time_s, parts in zip(times, series, strict=True):
        slot = min(int(time_s / total_s * _NUM_POINTS), _NUM_POINTS - 1) if total_s else 0
        known = parts_at.get(slot)
        if known is None or sum(parts.values()) > sum(known.values()):
            parts_at[slot] = parts
    points = [(slot / _NUM_POINTS * WIDTH, parts) for slot, parts in sorted(parts_at.items())]
    return [*points, (float(WIDTH), series[-1])]


def _area(
    part: str, xs: Sequence[float], below: Sequence[int], above: Sequence[int], peak: int
) -> str:
    """Polygon of a part's memory between two step functions, below and above."""

    def y(size: int) -> float:
        return _AREA * (1 - size / peak)

    forward = [f"{xs[0]:.1f},{y(above[0]):.1f}"]
    back = [f"{xs[0]:.1f},{y(below[0]):.1f}"]
    for index in range(1, len(xs)):
        for sizes, line in ((above, forward), (below, back)):
            line.append(f"{xs[index]:.1f},{y(sizes[index - 1]):.1f}")
            line.append(f"{xs[index]:.1f},{y(sizes[index]):.1f}")
    points = " ".join([*forward, *reversed(back)])
    return f'<polygon class="{part}" points="{points}"><title>{part}</title></polygon>'
