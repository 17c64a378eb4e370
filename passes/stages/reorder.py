"""Another order of the runs of a staged program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from xdsl.ir import Operation

from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import functions_of, name_of, runs_of
from shardweave.passes.stages.cut import ScheduledRun, places_of_tasks


def reorder_runs(program: Program, tasks: Sequence[ScheduledRun]) -> None:
    """Let a staged program run its micro-batches in another order, in place.

    tasks: what is run on each micro-batch, in an order in which all ranks together can run it, with
    stages at as many coordinates as before; what there is no function for is left out. Linear in
    the runs.
    """
    stages = {name: one.stage for name, one in functions_of(program).items()}
    places = places_of_tasks(tasks)
    by_task: dict[tuple[str, int], Operation] = {}
    first: list[Operation] = []
    last: list[Operation] = []
    times: Counter[str] = Counter()
    for op, run in runs_of(program):
        if run.micro_batch is not None:
            by_task[run.function, run.micro_batch] = op
            continue
        op.properties["at"] = to_attribute(places[stages[run.function]][times[run.function]])
        times[run.function] += 1
        (last if by_task else first).append(op)
    order: list[Operation] = []
    for task in tasks:
        op = by_task.get((name_of(task.direction, task.stage), task.micro_batch))
        if op is not None:
            op.properties["at"] = to_attribute(task.at)
            order.append(op)
    program.reorder([*first, *order, *last])
