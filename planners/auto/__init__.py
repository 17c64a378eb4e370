"""The planner `auto`: a joint search over all dimensions of a plan, priced by one cost model."""

from shardweave.planners.auto.planner import plan_auto

__all__ = ["plan_auto"]
