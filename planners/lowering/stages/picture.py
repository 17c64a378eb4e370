"""A pipeline schedule drawn as text: a line for each rank, a column for each time step."""

from __future__ import annotations

from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of, name_of, runs_of
from shardweave.planners.lowering.stages.list_stages import KINDS
from shardweave.planners.schedules.list_order import UNIT_COSTS, times_of
from shardweave.planners.schedules.table import Action, Table


def picture_of(table: Table, num_stages: int) -> str:
    """Draw a table as text: a line for each rank with the cells of `moments_of`."""
    rows = moments_of(table, num_stages)
    width = max(len(cell) for row in rows for cell in row)
    lines = [
        f"rank {rank} " + "".join(f" {cell:<{width}}" for cell in row)
        for rank, row in enumerate(rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def moments_of(table: Table, num_stages: int) -> list[list[str]]:
    """Return the cells of a picture: by rank, its pass in each moment.

    `F3` is the forward pass of micro-batch 3; `B`, `I` and `W` are as in `table.Kind`. Passes of a
    rank's later stages are in lower case. `-` continues a pass of two moments, dots are bubbles. A
    rank begins a pass once its operands are there; messages take no time. Raises ValueError for a
    deadlock.
    """
    rows: list[list[str]] = [[] for _ in table]
    first = [min((action.stage for action in actions), default=0) for actions in table]
    for rank, action, start, end in times_of(table, num_stages, UNIT_COSTS):
        row = rows[rank]
        row += ["."] * (int(start) - len(row))
        word = action.kind if action.stage == first[rank] else action.kind.lower()
        row += [f"{word}{action.micro_batch}"] + ["-"] * (int(end - start) - 1)
    length = max(map(len, rows))
    return [row + ["."] * (length - len(row)) for row in rows]


def schedule_table_of(program: Program) -> tuple[Table, int]:
    """Read from a staged program its schedule's table, and its number of stages."""
    functions = functions_of(program)
    rows: list[list[Action]] = [[] for _ in range(program.needed_mesh().num_stages)]
    for run in runs_of(program):
        function = functions[run.function]
        if run.micro_batch is not None:
            kind = KINDS[function.direction]
            if kind == "W" and name_of("inputs", function.stage) not in functions:
                kind = "B"  # of the first stage, which has no other half
            rows[run.at].append(Action(function.stage, kind, run.micro_batch))
    stages = {function.stage for function in functions.values()}
    return tuple(map(tuple, rows)), len(stages)
