"""Another order of the runs of a staged program."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Operation

from shardweave.ir.literals import to_attribute
from shardweave.ir.program import Program
from shardweave.ir.rewrite.stages.cut import Task
from shardweave.ir.staged import functions_of, name_of, runs_of


def reorder_runs(program: Program, places: Sequence[int], tasks: Sequence[Task]) -> None:
    """Let a staged program run its micro-batches in another order, in place.

    places: by stage, the coordinate on the stage axis of its ranks. tasks: what is run on each
    micro-batch, in an order in which all ranks together can run it; what there is no function for
    is left out. Linear in the runs.
    """
    stages = {name: one.stage for name, one in functions_of(program).items()}
    by_task: dict[tuple[str, int], Operation] = {}
    first: list[Operation] = []
    last: list[Operation] = []
    for op, run in runs_of(program):
        op.properties["at"] = to_attribute(places[stages[run.function]])
        if run.micro_batch is not None:
            by_task[run.function, run.micro_batch] = op
        else:
            (last if by_task else first).append(op)
    named = ((name_of(direction, stage), number) for direction, stage, number in tasks)
    program.reorder([*first, *(by_task[one] for one in named if one in by_task), *last])
