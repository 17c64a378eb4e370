"""Lowering of a global program by a plan to the program that every rank runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xdsl.passes import ModulePass

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.passes.notes import Listener, drop, heard_from
from shardweave.passes.observers import Observer
from shardweave.passes.pipeline import PassPipeline
from shardweave.passes.prepare.split_axes import SplitAxesPass
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.plan_passes import chosen_by, passes_after, passes_before
from shardweave.planners.plan.plan import Plan

Passes = str | Iterable[ModulePass | str]

ONE_DEVICE_PASSES = "cse,dce"


def partition(
    program: Program,
    mesh: Mesh,
    plan: Plan | None,
    passes: Passes = (),
    observer: Observer | None = None,
    buffers: Mapping[str, Sharding] | None = None,
    tell: Listener = drop,
) -> Program:
    """Lower a global program to the one that every rank of `mesh` runs.

    The user's `passes` run after those that shard the program and before those that schedule
    messages (bucket-collectives, start-collectives, overlap-communication); the latter are left
    out if `passes` hold them. If `passes` hold `insert-collectives`, they replace all other
    passes except `apply-plan`, and must carry out the plan's fields beside shardings. Without a
    plan (on one device) the program is only cleaned up. observer: is called for each pass.
    buffers: stored shardings of buffers, for a step's further programs, whose mesh is the
    plan's; None for the first. tell: receives the notes of passes that carry out the plan's
    choices (`chosen_by`); notes of default passes are dropped.
    """
    given = PassPipeline([passes] if isinstance(passes, str) else passes).passes
    first, last = PassPipeline(ONE_DEVICE_PASSES), PassPipeline([])
    if plan is not None:
        names = {p.name for p in given}
        if "insert-collectives" in names:
            first = PassPipeline([ApplyPlanPass.of(plan)])
        else:
            first = PassPipeline(passes_before(plan))
            last = PassPipeline(passes_after(plan, names))
        program = program.clone()
        program.set_mesh(mesh)
        if buffers is not None:
            program.set_mesh(mesh.refined(plan.mesh))
            _pin_buffers(program, buffers)
            first, given = _without_splits(first.passes), _without_splits(given).passes
    chosen = set[str]() if plan is None else chosen_by(plan)
    with heard_from(chosen, tell):
        local = first.run(program, observer=observer)
    local = PassPipeline(given).run(local, observer=observer) if given else local
    with heard_from(chosen, tell):
        return last.run(local, observer=observer) if last.passes else local


def _without_splits(passes: Iterable[ModulePass]) -> PassPipeline:
    """Drop `split-axes`: for a step's further programs the mesh is split already."""
    return PassPipeline([each for each in passes if each.name != SplitAxesPass.name])


def _pin_buffers(program: Program, buffers: Mapping[str, Sharding]) -> None:
    program.set_argument_attributes(
        "dist.sharding",
        {
            index: ShardingAttr.of(buffers[slot.name], shape_of(slot.value))
            for index, slot in enumerate(program.arguments)
            if slot.kind == "buffer" and slot.name in buffers
        },
    )
