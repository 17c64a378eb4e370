"""What the report says of a step in stages: its streams, its schedule, and each stage."""

from __future__ import annotations

from html import escape

from shardweave.driver.report.html import Cell, section, table, tiles
from shardweave.driver.report.pictures import timeline_html
from shardweave.ir.program.program import Program
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.lowering.stages.picture import picture_of, schedule_table_of
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation, StageResult


def stage_sections(program: Program, simulation: PipelineSimulation) -> list[str]:
    """The sections on a staged program and its simulation."""
    return [
        _tiles(simulation),
        section("Stages over time", timeline_html(simulation)),
        section(
            "Schedule", f"<pre class='wide'>{escape(picture_of(*schedule_table_of(program)))}</pre>"
        ),
        section("Stages", _stages(simulation)),
        section("Memory of each stage", _memory(simulation)),
    ]


def _tiles(simulation: PipelineSimulation) -> str:
    s, total = simulation, simulation.time_s or 1.0
    numbers = {
        "step": seconds_text(s.time_s),
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
    return table(head, (_row(number, one) for number, one in enumerate(simulation.stages)))


def _row(number: int, stage: StageResult) -> list[Cell]:
    return [
        f"{number}",
        (seconds_text(stage.compute_s + stage.slowdown_s),),
        (seconds_text(stage.exposed_communication_s),),
        (seconds_text(stage.bubble_s),),
        (f"{stage.in_flight}",),
        (bytes_text(stage.peak_bytes),),
    ]


def _memory(simulation: PipelineSimulation) -> str:
    parts = dict.fromkeys(part for one in simulation.stages for part in one.memory_parts)
    head: list[Cell] = ["stage", *((part,) for part in parts)]
    rows = [
        [f"{number}", *((bytes_text(one.memory_parts.get(part, 0)),) for part in parts)]
        for number, one in enumerate(simulation.stages)
    ]
    return table(head, rows)
