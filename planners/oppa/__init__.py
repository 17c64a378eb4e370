"""OPPA: Bayesian optimisation over parallelism configurations."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardweave.planners.oppa.planner import plan_oppa as plan_oppa


def __getattr__(name: str) -> Any:
    """Import the planner when it is first used: who only names a trial's types needs no scipy."""
    if name != "plan_oppa":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.planner").plan_oppa
