"""From the table of a schedule to what the functions of stages run."""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.ir.program.staged import Direction
from shardweave.passes.stages.cut import ScheduledRun
from shardweave.planners.schedules.table import Kind, Table, actions_in_order

DIRECTIONS: Mapping[Kind, Direction] = {
    "F": "forward",
    "B": "backward",
    "I": "inputs",
    "W": "weights",
}
KINDS: Mapping[Direction, Kind] = {direction: kind for kind, direction in DIRECTIONS.items()}


def tasks_of(table: Table, num_stages: int) -> list[ScheduledRun]:
    """What a table runs, in an order in which all ranks together can run it."""
    is_split = any(action.kind in "IW" for actions in table for action in actions)
    found: list[ScheduledRun] = []
    for rank, action in actions_in_order(table, num_stages):
        kinds: tuple[Kind, ...] = ("I", "W") if is_split and action.kind == "B" else (action.kind,)
        for kind in kinds:
            found.append(ScheduledRun(DIRECTIONS[kind], action.stage, action.micro_batch, rank))
    return found
