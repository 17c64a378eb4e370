"""Trials on real processes, of which slow ones are ended early, as is a whole search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError, Predicted
from shardweave.planners.trials.trials import Host, Launch, Limits, Outcome

T = TypeVar("T")
R = TypeVar("R")


class Deadline:
    """The end of a search, so many seconds from now; 0: never."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s if limit_s else math.inf

    @property
    def is_past(self) -> bool:
        return time.monotonic() >= self._end_s

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Results of a function of the first item, and of those that begin in time."""
        for number, item in enumerate(items):
            if number and self.is_past:
                return
            yield function(item)


def launch_of(host: Host | None, planner: str) -> Launch:
    """What starts processes. Raises PlanError where nothing can be trained."""
    if host is None or host.launch is None:
        option = "-O trials=10" if planner == "amp" else "-O real=true"
        raise PlanError(
            "real trials train a model, and here is only a program; name a model, as in "
            f"`shardweave plan gpt:layers=2,hidden=64 --planner {planner} {option}`."
        )
    return host.launch


@dataclass(eq=False)
class RealTrials:
    """Trains by plans, one after the other, and knows how long the fastest took.

    steps, time_limit_s: of a trial. slow: a trial ends when `driver.training.training.ENOUGH_SLOW`
    steps took more than so many times a step of the fastest trial; 0: never. fastest_s: a step of
    it.
    """

    launch: Launch
    steps: int
    time_limit_s: float
    slow: float
    fastest_s: float = math.inf

    def __post_init__(self) -> None:
        if self.slow and self.slow < 1:
            raise PlanError(
                f"slow is {self.slow:g}, and would end trials faster than the fastest; give a "
                "number above 1, or 0 to end none."
            )

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of earlier trials."""
        steps_s = [fmean(one.times_s) for one in outcomes if one.status == "ok"]
        self.fastest_s = min([self.fastest_s, *steps_s])

    def run(self, plan: Plan) -> Outcome:
        """Train by a plan."""
        most = self.slow * self.fastest_s if self.slow else math.inf
        outcome = self.launch(plan, Limits(self.steps, self.time_limit_s, most))
        self.learn([outcome])
        return outcome


def measured(outcome: Outcome) -> Predicted:
    """What a real trial took; how long of it was compute is not measured."""
    memory = {} if outcome.peak_bytes is None else {"peak": outcome.peak_bytes}
    return Predicted(fmean(outcome.times_s), memory_bytes=memory, source="measured")
