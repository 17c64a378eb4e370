"""What ranks run of a global program under the plans that so many processes allow.

Plans cut the batch (data parallelism, micro-batches and sub-batches alike) and the matrices (tensor
and sequence parallelism). Stages and recomputation run the same ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.planners.cost.workload import batch_of
from shardweave.planners.degrees import divisors
from shardweave.planners.lower import local_program
from shardweave.planners.megatron import plan_megatron
from shardweave.planners.plan_parts import PlanError


def pieces_of(program: Program, num_processes: int) -> list[Program]:
    """A local program for each size of a piece of the batch, tensor degree up to the number of
    processes, and both ways to hold activations; those that cannot be partitioned are left out.

    Of a program whose inputs have no batch the program itself.
    """
    try:
        batch = batch_of(program)
    except PlanError:
        return [program]
    found: list[Program] = []
    for mesh, is_cut in _ways(batch, num_processes):
        with suppress(ValueError):  # nor can a plan have that piece
            plan = plan_megatron(program, mesh, sequence_parallel=is_cut)
            found.append(local_program(program, plan))
    return found


def _ways(batch: int, num_processes: int) -> Iterator[tuple[Mesh, bool]]:
    for tensor in divisors(num_processes):
        for pieces in divisors(batch):
            for is_cut in (False, True) if tensor > 1 else (False,):
                yield Mesh(data=pieces, tensor=tensor), is_cut
