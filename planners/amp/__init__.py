"""AMP: degrees, micro-batches, stages and placement for pipelines on mixed clusters."""

from __future__ import annotations

from shardweave.planners.amp.planner import plan_amp

__all__ = ["plan_amp"]
