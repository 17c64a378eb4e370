"""Schedules of pipelines as data: which micro-batch each rank works on, and when."""

from __future__ import annotations

from shardweave.planners.pipelines.schedules import Schedule, find_schedule
from shardweave.planners.pipelines.table import Action, Table, in_order

__all__ = ["Action", "Schedule", "Table", "find_schedule", "in_order"]
