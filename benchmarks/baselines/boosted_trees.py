"""The planner `boosted-trees`, a baseline of `oppa`: trees as DeepSpeed's autotuner has XGBoost."""
# scikit-learn has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardweave.benchmarks.baselines.plain import PlainPlans
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.oppa.choosers import History, Suggestion, random_instead
from shardweave.planners.oppa.planner import DEFAULTS, TrialOptions, plan_by_trials
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.space import Floats
from shardweave.planners.trials.trials import Host

EXPLORING = 0.2
"""Share of the choices that are random after the first ones (DeepSpeed's)."""


@dataclass(frozen=True)
class TreeChooser:
    """The open configuration that gradient-boosted trees predict to be the fastest.

    What ran out of memory counts as a throughput of 0: trees say nothing of how sure they are.
    first: random trials at the start.
    """

    first: int = 5

    def choose(self, history: History, rng: np.random.Generator) -> Suggestion:
        """The open row of the largest prediction, or in one of five cases any."""
        instead = random_instead(history, self.first, rng)
        if instead is not None:
            return instead
        rows = history.open_rows
        if rng.random() < EXPLORING:
            return Suggestion(int(rng.choice(rows)), "random: exploring")
        predicted = self._predict(history, rows)
        index = int(rng.choice(np.flatnonzero(predicted == predicted.max())))
        return Suggestion(rows[index], f"predicted {predicted[index] * history.scale:.4g} steps/s")

    def _predict(self, history: History, rows: list[int]) -> Floats:
        try:
            from sklearn.ensemble import GradientBoostingRegressor
        except ImportError as error:
            raise ValueError(
                f"planner 'boosted-trees' needs scikit-learn, which cannot be imported ({error}); "
                "install it with pip install 'shardweave[oppa]'."
            ) from error
        values = [
            one.outcome.throughput / history.scale if history.fits(one) else 0.0
            for one in history.records
        ]
        model = GradientBoostingRegressor(n_estimators=100, max_depth=3, random_state=0)
        model.fit(history.table.features[list(history.rows)], np.array(values))
        return np.asarray(model.predict(history.table.features[rows]), dtype=np.float64)


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

    Objective, options and errors: those of `plan_oppa`. Not exact. Time: a trial each.
    """
    return plan_by_trials(
        PlainPlans("boosted-trees", program, cluster, mesh), TreeChooser(), options, host
    )
