"""The planner `boosted-trees`, a baseline of `oppa`."""

from __future__ import annotations

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.oppa.planner import DEFAULTS, TrialOptions, plan_by_trials
from shardweave.planners.oppa.trees import TreeChooser
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.trials import Host


def plan_boosted_trees(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    host: Host | None = None,
    options: TrialOptions = DEFAULTS,
) -> Plan:
    """Try the plans that gradient-boosted trees, fitted to the trials, predict to be fastest.

    One trial in five is random, as in DeepSpeed's autotuner. Needs scikit-learn.

    Objective, space, options and errors: those of `plan_oppa`. Not exact. Time: a trial each.
    """
    return plan_by_trials("boosted-trees", program, mesh, cluster, TreeChooser(), options, host)
