"""Plans with pipeline stages and ZeRO, which are simulated event by event."""

from __future__ import annotations

from shardweave.planners.cost.pipeline.result import PipelineSimulation, StageResult
from shardweave.planners.cost.pipeline.simulation import simulate_stages

__all__ = ["PipelineSimulation", "StageResult", "simulate_stages"]
