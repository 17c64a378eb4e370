"""The planner `random`, a baseline of `oppa`."""

from __future__ import annotations

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.oppa.choosers import RandomChooser
from shardweave.planners.oppa.planner import DEFAULTS, TrialOptions, plan_by_trials
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.trials import Host


def plan_random(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    host: Host | None = None,
    options: TrialOptions = DEFAULTS,
) -> Plan:
    """Try plans at random: any that was not tried, all equally likely.

    Objective, space, options and errors: those of `plan_oppa`. Not exact. Time: a trial each.
    """
    return plan_by_trials("random", program, mesh, cluster, RandomChooser(), options, host)
