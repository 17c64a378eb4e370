"""What ranks run of a global program under the plans that so many processes allow."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from shardweave.ir.program.program import Program
from shardweave.planners.auto.reader import Depths
from shardweave.planners.auto.space.cuts import cut_plan, replica_cuts, tensor_degrees
from shardweave.planners.cost.workload import batch_of
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.plan.plan_parts import PlanError


def profiled_programs(program: Program, num_processes: int) -> list[Program]:
    """A local program for each partition that `auto` looks at for so many devices of one node,
    with a few blocks of a deep model; those that cannot be are left out.

    Stages and recomputation run the same ops. Of a program whose inputs have no batch the program
    itself.
    """
    try:
        batch = batch_of(program)
    except PlanError:
        return [program]
    read = Depths.of(program).read
    degrees = tensor_degrees(num_processes, num_processes)
    cuts = replica_cuts(partial(cut_plan, read, 1), batch, num_processes, degrees)
    found: list[Program] = []
    for cut, pieces in cuts.partitions():
        with suppress(ValueError):  # nor can a plan have that piece
            found.append(local_program(read, cut_plan(read, pieces, cut)))
    return found
