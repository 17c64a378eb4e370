"""The baselines as planners: by name in `sw.plan`, as those of the package."""

from __future__ import annotations

from shardweave.benchmarks.baselines.boosted_trees import plan_boosted_trees
from shardweave.benchmarks.baselines.exhaustive import plan_exhaustive
from shardweave.benchmarks.baselines.random_trials import plan_random
from shardweave.planners.registry import register_planner


def register_baselines() -> None:
    """Make `boosted-trees`, `exhaustive` and `random` known as planners."""
    register_planner("boosted-trees", plan_boosted_trees)
    register_planner("exhaustive", plan_exhaustive)
    register_planner("random", plan_random)
