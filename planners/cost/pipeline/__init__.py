"""Plans with pipeline stages and ZeRO, which are simulated event by event."""

from __future__ import annotations

from shardweave.planners.cost.pipeline.runs import simulate_runs
from shardweave.planners.cost.pipeline.simulation import PipelineSimulation, simulate_stages

__all__ = ["PipelineSimulation", "simulate_runs", "simulate_stages"]
