"""What the program that calls a planner offers to it: real trials, and ears for progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardweave.planners.oppa.trials import Outcome
from shardweave.planners.plan import Plan

Launch = Callable[[Plan, int, float], Outcome]
"""Trains by a plan on real processes, for a number of steps, within a number of seconds."""


@dataclass(frozen=True)
class Host:
    """What the program that calls a planner offers it.

    launch: None where real trials cannot be made. tell: takes a line after every trial.
    """

    launch: Launch | None = None
    tell: Callable[[str], None] | None = None
