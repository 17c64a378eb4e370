"""Cutting a step into the functions of its stages, and the schedule that runs them."""

from __future__ import annotations

from shardweave.ir.rewrite.stages.cut import cut_into_stages

__all__ = ["cut_into_stages"]
