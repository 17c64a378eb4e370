"""The caller of a planner as the planner sees it: it may run real trials and show progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardweave.planners.oppa.trials import Outcome
from shardweave.planners.plan import Plan

Launch = Callable[[Plan, int, float], Outcome]
"""Trains by a plan on real processes, for a number of steps, within a number of seconds."""


@dataclass(frozen=True)
class Host:
    """The services of a planner's caller.

    launch: None where real trials cannot be made. tell: a callback, given a line after every trial.
    """

    launch: Launch | None = None
    tell: Callable[[str], None] | None = None
