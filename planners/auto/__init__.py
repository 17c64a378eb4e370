"""The planner `auto`: one search over everything, priced by one model."""

from shardweave.planners.auto.planner import plan_auto

__all__ = ["plan_auto"]
