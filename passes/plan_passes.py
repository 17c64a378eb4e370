"""From a plan to the passes that carry it out, and to what it takes on a cluster."""

from __future__ import annotations

from xdsl.passes import ModulePass

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.overlap_communication import OverlapCommunicationPass
from shardweave.passes.pipeline import PassPipeline
from shardweave.passes.rematerialize import RematerializePass
from shardweave.passes.split_batch import SplitBatchPass
from shardweave.planners.cluster import Cluster
from shardweave.planners.plan import Plan
from shardweave.planners.plan_check import check_runnable
from shardweave.planners.plan_parts import PlanError, Predicted
from shardweave.planners.predict import predicted_of
from shardweave.planners.simulate import simulate

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
        cluster = {"cluster": plan.cluster} if plan.cluster else {}
        found += ["start-collectives", OverlapCommunicationPass(plan.schedule, **cluster)]
    return found


def simulate_plan(
    program: Program, plan: Plan, cluster: Cluster, *, optimizer_multiplier: float = 2.0
) -> Predicted:
    """Partition a global program by a plan, and simulate a step of it on a cluster.

    optimizer_multiplier: bytes of optimizer state per byte of parameters; 2 for Adam. Raises
    ValueError (PlanError, PassError, ClusterError) if it cannot be partitioned or placed.
    """
    target = program.clone()
    target.set_mesh(Mesh(**plan.mesh))
    local = PassPipeline(plan_passes(plan)).run(target)
    return predicted_of(simulate(local, cluster, optimizer_multiplier=optimizer_multiplier))
