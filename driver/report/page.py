"""The report: one HTML page that says what a step is, where its time and memory go, and why.

The page has no scripts and asks for no other file, so that it can be mailed and kept.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from shardweave.driver.report.html import (
    Cell,
    document,
    memory_html,
    section,
    table,
    tiles,
    timeline_html,
)
from shardweave.driver.report.reshards import Row
from shardweave.driver.report.shardings import pictures_of, rank_ranges, sharding_svg
from shardweave.driver.report.text import flops_text
from shardweave.ir.inspect.outline import fold, layers_of, part_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.lowering.stages.picture import picture_of, schedule_table_of
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.simulate.simulation import Simulation
from shardweave.planners.simulate.timeline import COMPUTE

_OF_EQUAL_LAYERS = "<p class='soft'>Of equal layers, the first.</p>"


def report_page(
    program: Program,
    simulation: Simulation | PipelineSimulation,
    *,
    title: str,
    plan: Plan | None = None,
    reshards: Sequence[Row] = (),
) -> str:
    """Make the page for a local program (or one without a mesh) and its simulation on a cluster.
    reshards: reshards of the global program from which it was made."""
    if isinstance(simulation, PipelineSimulation):
        said, sections = "", stage_sections(program, simulation)
    else:
        said, sections = ", for one device", _sections(program, simulation)
    if reshards:
        head = ("layer", "phase", "value", "from", "to", "why")
        sections.append(section("Reshards", _OF_EQUAL_LAYERS + table(head, reshards)))
    if plan is not None:
        sections.append(section("Plan", _plan(plan)))
    where = f"mesh {simulation.mesh}" if simulation.mesh.axes else "one device"
    head = (
        f"<h1>{escape(title)}</h1><p class='soft'>One training step on {escape(where)} of "
        f"{escape(simulation.cluster.name)}; times are simulated{said}.</p>"
    )
    return document(title, head + "\n".join(sections))


def _sections(program: Program, simulation: Simulation) -> list[str]:
    """Return the page's sections for a program without stages."""
    return [
        _tiles(program, simulation),
        section("Streams over time", timeline_html(simulation)),
        section("Communication", _communication(program, simulation)),
        section("Memory over time", memory_html(program, simulation) + _memory(simulation)),
        section("Layers", _layers(program, simulation)),
        section("Shardings", _shardings(program, simulation.mesh)),
    ]


def _tiles(program: Program, simulation: Simulation) -> str:
    s, total = simulation, simulation.time_s or 1.0
    stats = program.stats()
    numbers = {
        "step": seconds_text(s.step_s),
        **({"update in it": seconds_text(s.update_s)} if s.update else {}),
        f"compute ({s.compute_s / total:.0%})": seconds_text(s.compute_s),
        f"exposed communication ({s.exposed_communication_s / total:.0%})": seconds_text(
            s.exposed_communication_s
        ),
        "of the lower bound": f"{s.ratio:.2f} x",
        f"peak memory of {bytes_text(s.memory_bytes)}": bytes_text(s.peak_bytes),
        "parameters on one device": bytes_text(stats.parameter_bytes),
        "work of one device": flops_text(sum(stats.flops.values())),
        "ops": f"{sum(stats.ops.values()):,}",
    }
    return tiles(numbers, fits=s.peak_bytes <= s.memory_bytes)


def _communication(program: Program, simulation: Simulation) -> str:
    rows = [
        (
            c.kind,
            ", ".join(c.axes),
            c.phase,
            (f"{c.count}",),
            (bytes_text(c.bytes),),
            (bytes_text(c.sent_bytes),),
        )
        for c in program.stats().collectives
    ]
    if not rows:
        return "<p>No collectives.</p>"
    head = ("collective", "axes", "phase", ("count",), ("bytes",), ("sent by one device",))
    times = "".join(
        f"<p>Over {escape(', '.join(axes))}: {seconds_text(seconds)}, of which "
        f"{seconds_text(simulation.exposed_s.get(axes, 0.0))} exposed.</p>"
        for axes, seconds in sorted(simulation.communication_s.items())
    )
    return times + table(head, rows)


def _memory(simulation: Simulation) -> str:
    parts = {part: size for part, size in simulation.memory.parts.items() if size}
    rows = [(part, (bytes_text(size),)) for part, size in parts.items()]
    return table(("at the peak", ("bytes",)), rows)


def _layers(program: Program, simulation: Simulation) -> str:
    compute_s: defaultdict[str, float] = defaultdict(float)
    communication_s: defaultdict[str, float] = defaultdict(float)
    blocks = blocks_of(program)
    for event in simulation.events:
        times = compute_s if event.stream == COMPUTE else communication_s
        times[part_of(event.layer, blocks)] += event.end_s - event.start_s
    rows: list[Sequence[Cell]] = []
    for row in fold(layers_of(program)):
        first = row.first
        rows.append(
            (
                row.name,
                *((f"{first.ops.get(p, 0) or '-'}",) for p in ("forward", "recompute", "backward")),
                (flops_text(sum(first.flops.values())),),
                (bytes_text(first.parameter_bytes) if first.parameter_bytes else "-",),
                (seconds_text(compute_s[first.name]),),
                (seconds_text(communication_s[first.name]),),
                first.moves or "-",
            )
        )
    head: list[Cell] = ["layer", ("forward",), ("recompute",), ("backward",), ("work",)]
    head += [("parameters",), ("compute",), ("communication",), "collectives"]
    return _OF_EQUAL_LAYERS + table(head, rows)


def _shardings(program: Program, mesh: Mesh) -> str:
    if mesh.num_devices == 1:
        return "<p>One device holds everything.</p>"
    figures = "".join(f"<figure>{sharding_svg(p, mesh)}</figure>" for p in pictures_of(program))
    rows = [
        (axis.name, axis.kind, (f"{axis.size}",), groups_text(mesh, axis.name))
        for axis in mesh.space_axes
    ]
    axes = table(("axis", "kind", ("size",), "devices of each group"), rows)
    return (
        "<p class='soft'>Each rectangle is a tensor; its cells name the devices that hold them. "
        "A device named in every cell holds the whole.</p>"
        f'{axes}<div class="pictures">{figures}</div>'
    )


_SHOWN_GROUPS = 8


def groups_text(mesh: Mesh, axis: str) -> str:
    """The devices of the first groups along an axis: `0-1; 2-3`."""
    groups = [rank_ranges(sorted(group)) for group in mesh.groups((axis,))]
    return "; ".join(groups[:_SHOWN_GROUPS]) + ("; ..." if len(groups) > _SHOWN_GROUPS else "")


def _plan(plan: Plan) -> str:
    data: dict[str, Any] = json.loads(plan.to_json())
    tables = {key: data.pop(key) for key in ("parameters", "inputs", "activations")}
    for key in ("format", "reasons", "notes", "predicted", "candidates"):
        data.pop(key, None)
    parts = [
        table(("choice", "value"), [(k.replace("_", " "), _plain(v)) for k, v in data.items()])
    ]
    said = (*plan.reasons, *plan.notes)
    if said:
        parts.append(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in said)}</ul>")
    looked_at = plan.candidates
    if not looked_at and plan.predicted is not None:
        looked_at = (Candidate("this plan", plan.predicted),)
    if looked_at:
        head: list[Cell] = ["considered", ("step",), ("compute",), ("communication",)]
        head += [("exposed",), ("bubble",), ("memory",), "why"]
        parts.append(table(head, map(_candidate, looked_at)))
    for kind, entries in tables.items():
        if entries:
            body = table((kind, "sharding"), entries.items())
            count = f"{len(entries)} {kind}"
            parts.append(f"<details><summary>{count}</summary>{body}</details>")
    return "".join(parts)


def _candidate(candidate: Candidate) -> tuple[Cell, ...]:
    p = candidate.predicted
    times = (p.time_s, p.compute_s, sum(p.communication_s.values()), p.exposed_s, p.bubble_s)
    return (
        candidate.name,
        *((seconds_text(time_s),) for time_s in times),
        (bytes_text(p.peak_bytes),),
        candidate.reason,
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "-"
    return str(value)


def stage_sections(program: Program, simulation: PipelineSimulation) -> list[str]:
    """The sections on a staged program and its simulation."""
    return [
        _pipeline_tiles(simulation),
        section("Stages over time", timeline_html(simulation)),
        section(
            "Schedule", f"<pre class='wide'>{escape(picture_of(*schedule_table_of(program)))}</pre>"
        ),
        section("Stages", _stages(simulation)),
        section("Memory of each stage", _memory_of_stages(simulation)),
    ]


def _pipeline_tiles(simulation: PipelineSimulation) -> str:
    s, total = simulation, simulation.time_s or 1.0
    numbers = {
        "step": seconds_text(s.step_s),
        **({"update in it": seconds_text(s.update_s)} if s.update else {}),
        "stages": f"{len(s.stages)}",
        "micro-batches": f"{s.micro_batches}",
        "schedule": s.schedule,
        f"the busiest stage waits ({s.bubble_s / total:.0%})": seconds_text(s.bubble_s),
        "of the lower bound": f"{s.ratio:.2f} x",
        f"peak memory of {bytes_text(s.memory_bytes)}": bytes_text(s.peak_bytes),
    }
    return tiles(numbers, fits=s.peak_bytes <= s.memory_bytes)


def _stages(simulation: PipelineSimulation) -> str:
    head: list[Cell] = ["stage", ("compute",), ("exposed communication",), ("waiting",)]
    head += [("micro-batches in flight",), ("peak memory",)]
    rows: list[list[Cell]] = [
        [
            f"{number}",
            (seconds_text(stage.compute_s + stage.slowdown_s),),
            (seconds_text(stage.exposed_communication_s),),
            (seconds_text(stage.bubble_s),),
            (f"{stage.in_flight}",),
            (bytes_text(stage.peak_bytes),),
        ]
        for number, stage in enumerate(simulation.stages)
    ]
    return table(head, rows)


def _memory_of_stages(simulation: PipelineSimulation) -> str:
    parts = dict.fromkeys(part for stage in simulation.stages for part in stage.memory_parts)
    head: list[Cell] = ["stage", *((part,) for part in parts)]
    rows = [
        [f"{number}", *((bytes_text(stage.memory_parts.get(part, 0)),) for part in parts)]
        for number, stage in enumerate(simulation.stages)
    ]
    return table(head, rows)
