"""Checks that a plan fits a program and a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import (
    Lookup,
    argument_shardings,
    attribute_text,
    check_known,
    check_names,
    sharding_text,
)
from shardweave.planners.plan.plan_parts import PlanError


def check_plan(plan: Plan, program: Program) -> None:
    """Raise PlanError unless the plan can be applied to a global program on the plan's mesh."""
    check_names(plan, program)
    tables = (("param", plan.parameters), ("param", plan.used), ("input", plan.inputs))
    for kind, table in tables:
        argument_shardings(program, kind, table, Mesh(**plan.mesh))
    check_stages(plan, program)
    check_recomputed(plan, program)


def check_followed(plan: Plan, program: Program) -> None:
    """Raise PlanError if a sharded program's mesh, names or shardings differ from the plan's.

    Shardings are not compared under ZeRO or a pipeline, which change how parameters are stored."""
    own = program.mesh or Mesh()
    mesh = Mesh(**plan.mesh).on_parts_of(own)
    what_to_do = "give the plan that the program was made with, or leave the plan out."
    if plan.mesh and mesh.device_axes != own.device_axes:
        raise PlanError(
            f"the program is partitioned for mesh {Mesh(own.device_axes)}, but the plan is for "
            f"mesh {mesh}; {what_to_do}"
        )
    check_names(replace(plan, activations={}), program)
    if plan.zero or plan.is_pipeline:
        return
    for index, asked in argument_shardings(program, "param", plan.parameters, own).items():
        slot = program.arguments[index]
        sharding, shape = program.sharding_of_slot(slot), program.global_shape_of(slot)
        if asked.on(shape, own) != sharding:
            raise PlanError(
                f"the program stores param '{slot.name}' as "
                f"{sharding_text(sharding.dims, shape)}, but the plan says "
                f"{attribute_text(asked)}; {what_to_do}"
            )


def check_recomputed(plan: Plan, program: Program) -> None:
    """Raise PlanError for a name in `recompute_in` that matches no block, and for a plan with
    such names whose policy recomputes nothing."""
    if not plan.recompute_in:
        return
    if plan.recompute == "none":
        raise PlanError(
            "the plan has 'recompute_in', a list of blocks to recompute, but 'recompute' is "
            "none; set 'recompute' to a policy, or remove 'recompute_in'."
        )
    check_known(
        "the plan's 'recompute_in' names block", plan.recompute_in, blocks_of(program).names
    )


def check_stages(plan: Plan, program: Program, modules: Iterable[str] = ()) -> None:
    """Raise PlanError if a block is in several stages, or a stage's name matches no layer.
    modules: further names that a stage may hold (modules of the model that may have no op)."""
    if plan.pipeline is None:
        return
    blocks = blocks_of(program).names
    known = dict.fromkeys(sorted({*program.layers(), *blocks, *modules}))
    for index, stage in enumerate(plan.pipeline.stages):
        check_known(f"stage {index} of the plan names layer", stage, known)
    for block in sorted(blocks):
        places = [
            index
            for index, stage in enumerate(plan.pipeline.stages)
            if Lookup(dict.fromkeys(stage, "")).key(block) is not None
        ]
        if len(places) > 1:
            raise PlanError(f"the plan puts block '{block}' into stages {places}; put it into one.")
