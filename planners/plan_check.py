"""Whether a plan fits a program and a mesh, and whether a backend can run it yet."""

from __future__ import annotations

from shardweave.ir.blocks import blocks_of
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.planners.plan import Plan
from shardweave.planners.plan_names import Lookup, argument_shardings, check_names
from shardweave.planners.plan_parts import PlanError


def check_plan(plan: Plan, program: Program) -> None:
    """Raises PlanError unless a global program on the plan's mesh can follow the plan."""
    check_names(plan, program)
    tables = (("param", plan.parameters), ("param", plan.used), ("input", plan.inputs))
    for kind, table in tables:
        argument_shardings(program, kind, table, Mesh(**plan.mesh))
    _check_stages(plan, program)


def _check_stages(plan: Plan, program: Program) -> None:
    """Every layer with a block of its own is in one stage, and every name stands for a layer."""
    if plan.pipeline is None:
        return
    layers = {layer for layer in program.layers() if layer}
    blocks = blocks_of(program).names
    known = layers | set(blocks)
    for index, stage in enumerate(plan.pipeline.stages):
        missing = Lookup(dict.fromkeys(stage, "")).unmatched(known)
        if missing:
            raise PlanError(
                f"stage {index} names layer '{missing[0]}', which this program does not have (it "
                f"has {', '.join(sorted(known)[:4])}, ...); the plan was made for another model, "
                "or the name is misspelt."
            )
    for block in sorted(blocks):
        places = [
            index
            for index, stage in enumerate(plan.pipeline.stages)
            if Lookup(dict.fromkeys(stage, "")).key(block) is not None
        ]
        if len(places) > 1:
            raise PlanError(f"block '{block}' is in stages {places}; leave it in one.")


def check_runnable(plan: Plan) -> None:
    """Raises PlanError for what no backend can run yet, with what to do instead."""
    reason = why_not_runnable(plan)
    if reason is not None:
        raise PlanError(reason)


def is_runnable(plan: Plan) -> bool:
    """Whether a backend can run the plan."""
    return why_not_runnable(plan) is None


def why_not_runnable(plan: Plan) -> str | None:
    """What of a plan no backend can run yet, and what to do; None if all can be run."""
    explain = "read what it is predicted to take with `shardweave plan --explain`"
    if plan.zero:
        return (
            f"the plan asks for ZeRO stage {plan.zero}, which no backend can run yet; {explain}, "
            "or set zero to 0."
        )
    return None
