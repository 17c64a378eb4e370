"""What plans are predicted to take, from simulations."""

from __future__ import annotations

from shardweave.ir.program import Program
from shardweave.planners.cluster import Cluster
from shardweave.planners.plan import Plan
from shardweave.planners.plan_parts import Predicted
from shardweave.planners.simulate import Simulation, simulate
from shardweave.planners.workload import Localize

ADAM_STATE = 2.0
"""Bytes of optimizer state per byte of parameters: two moments in the parameters' dtype."""


def predicted_of(simulation: Simulation) -> Predicted:
    """The numbers of a simulation as a plan keeps them."""
    return Predicted(
        time_s=simulation.time_s,
        compute_s=simulation.compute_s + simulation.slowdown_s,
        communication_s={",".join(axes): t for axes, t in simulation.communication_s.items()},
        exposed_s=simulation.exposed_communication_s,
        memory_bytes={part: size for part, size in simulation.memory.parts.items() if size},
        capacity_bytes=simulation.memory_bytes,
        source="simulated",
    )


def simulate_plan(
    program: Program,
    plan: Plan,
    cluster: Cluster,
    localize: Localize,
    *,
    optimizer_multiplier: float = ADAM_STATE,
) -> Predicted:
    """Partition a global program by a plan, and simulate a step of it on a cluster.

    Raises ValueError (PlanError, PassError, ClusterError) if it cannot be partitioned or placed.
    """
    local = localize(program, plan)
    return predicted_of(simulate(local, cluster, optimizer_multiplier=optimizer_multiplier))
