"""Oases (arXiv 2305.16121): a degree of tensor parallelism for each block."""

from shardweave.planners.oases.planner import plan_oases

__all__ = ["plan_oases"]
