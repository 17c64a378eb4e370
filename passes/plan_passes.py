"""From a plan to the passes that carry it out, and to the program of each rank."""

from __future__ import annotations

from dataclasses import replace

from xdsl.passes import ModulePass

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.notes import unheard
from shardweave.passes.overlap_communication import OverlapCommunicationPass
from shardweave.passes.pipeline import PassPipeline
from shardweave.passes.rematerialize import RematerializePass
from shardweave.passes.split_batch import SplitBatchPass
from shardweave.planners.plan import Plan
from shardweave.planners.plan_check import check_runnable
from shardweave.planners.plan_parts import PlanError

PARTITIONING = "propagate-shardings,insert-collectives"
CLEANING = "cse,dce,merge-collectives"
UNROLLING = "unroll-time-axes"


def annotating_passes(plan: Plan) -> list[ModulePass | str]:
    """What makes a global program say all that the plan decides on shardings and sub-batches."""
    check_runnable(plan)
    found: list[ModulePass | str] = [ApplyPlanPass.of(plan)]
    if plan.batch_split > 1:
        found.append(SplitBatchPass(plan.batch_split))
    return found


def plan_passes(plan: Plan) -> list[ModulePass | str]:
    """All passes from a global program on a mesh to the local one that follows the plan.

    Raises PlanError for what no backend can run yet.
    """
    found = [*annotating_passes(plan), PARTITIONING]
    if plan.batch_split > 1:
        found.append(UNROLLING)
    return [*found, CLEANING, *_later(plan)]


def _later(plan: Plan) -> list[ModulePass | str]:
    found: list[ModulePass | str] = []
    if plan.recompute != "none":
        found.append(RematerializePass(plan.recompute))
    if plan.schedule:
        if plan.schedule == "list" and not plan.cluster:
            raise PlanError(
                "the plan's schedule 'list' orders ops for a cluster, and the plan names none; "
                "give 'cluster', a preset's name or a file, or another schedule."
            )
        overlap = OverlapCommunicationPass(plan.schedule)
        overlap = replace(overlap, cluster=plan.cluster) if plan.cluster else overlap
        found += ["start-collectives", overlap]
    return found


def localize(program: Program, plan: Plan) -> Program:
    """The program of each rank of the plan's mesh, from a global one.

    Raises ValueError (PlanError, PassError) if the plan does not fit, or cannot run yet.
    """
    target = program.clone()
    target.set_mesh(Mesh(**plan.mesh))
    with unheard():
        return PassPipeline(plan_passes(plan)).run(target)
