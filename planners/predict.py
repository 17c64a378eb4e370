"""What plans are predicted to take, from simulations."""

from __future__ import annotations

from shardweave.planners.plan_parts import Predicted
from shardweave.planners.simulate import Simulation


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
