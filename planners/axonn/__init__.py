"""AxoNN's planner: grids of x, y, z and data, ranked by a communication model."""

from shardweave.planners.axonn.planner import plan_axonn

__all__ = ["plan_axonn"]
