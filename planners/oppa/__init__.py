"""OPPA: Bayesian optimisation over parallelism configurations."""

from shardweave.planners.oppa.planner import plan_oppa as plan_oppa
