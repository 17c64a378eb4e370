"""Test whether the micro-batches of a program can run one by one, before any plan is made."""

from __future__ import annotations

from dataclasses import replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.stages.batches import micro_batches_of
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.workload import batch_of
from shardweave.planners.lowering.lower import lowered
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline


def why_not_one_by_one(program: Program) -> str:
    """The reason why micro-batches cannot run one by one, such as batch norm; empty if they can.
    Partitions the global program once, with the fewest micro-batches that divide its batch."""
    count = next((n for n in divisors(batch_of(program)) if n > 1), 1)
    if count == 1:
        return ""
    plan = replace(plan_megatron(program, Mesh()), pipeline=Pipeline((("*",),), count))
    try:
        micro_batches_of(lowered(program, plan, PlanPasses.of(plan).partitioning))
    except ValueError as error:
        return str(error)
    return ""
