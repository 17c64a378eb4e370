"""The planner `random`, a baseline of `oppa`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardweave.benchmarks.baselines.plain import PlainPlans
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.oppa.choosers import History, Suggestion
from shardweave.planners.oppa.planner import DEFAULTS, TrialOptions, plan_by_trials
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.trials import Host


@dataclass(frozen=True)
class RandomChooser:
    """Any row, all equally likely."""

    def choose(self, history: History, rng: np.random.Generator) -> Suggestion:
        return Suggestion(int(rng.choice(history.open_rows)), "random")


def plan_random(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    host: Host | None = None,
    options: TrialOptions = DEFAULTS,
) -> Plan:
    """Try plans at random: any that was not tried, all equally likely.

    Objective, options and errors: those of `plan_oppa`. Not exact. Time: a trial each.
    """
    return plan_by_trials(
        PlainPlans("random", program, cluster, mesh), RandomChooser(), options, host
    )
