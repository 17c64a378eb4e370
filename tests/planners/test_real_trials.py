"""Real trials: slow ones end early, and amp tries its best estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from shardweave.driver.training.training import ENOUGH_SLOW
from shardweave.planners.amp.planner import plan_amp
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.trials.trials import Host, Limits, Outcome, RealTrials, launch_of
from shardweave.tests.planners.test_amp_planner import HET, SPEC, lowerings


@dataclass
class Fake:
    """Seconds of a step by the number of the trial; a trial without is out of memory."""

    seconds: Mapping[int, float]
    limits: list[Limits] = field(default_factory=list[Limits])
    plans: list[Plan] = field(default_factory=list[Plan])

    def __call__(self, plan: Plan, limits: Limits) -> Outcome:
        number = len(self.plans)
        self.limits.append(limits)
        self.plans.append(plan)
        if number not in self.seconds:
            return Outcome("out_of_memory", message="error: no memory")
        return Outcome("ok", (self.seconds[number],) * limits.steps, 7.0)


def test_trial_may_take_so_many_times_the_fastest_before_it() -> None:
    fake = Fake({0: 2.0, 1: 0.5, 3: 1.0})
    trials = RealTrials(fake, steps=4, time_limit_s=9.0, slow=3.0)
    for _ in range(5):
        trials.run(Plan())
    limits = [one.stop_above_s for one in fake.limits]
    assert limits == [float("inf"), 6.0, 1.5, 1.5, 1.5]
    assert {(one.steps, one.time_limit_s) for one in fake.limits} == {(4, 9.0)}


def test_trials_of_an_earlier_search_are_known() -> None:
    fake = Fake({0: 1.0})
    trials = RealTrials(fake, steps=4, time_limit_s=9.0, slow=2.0)
    trials.learn([Outcome("ok", (0.25, 0.75)), Outcome("crashed")])
    trials.run(Plan())
    assert fake.limits[0].stop_above_s == 1.0


def test_no_trial_ends_early_where_that_is_not_asked_for() -> None:
    fake = Fake({0: 1.0, 1: 1.0})
    trials = RealTrials(fake, steps=4, time_limit_s=9.0, slow=0.0)
    trials.run(Plan())
    trials.run(Plan())
    assert fake.limits[1].stop_above_s == float("inf")
    with pytest.raises(PlanError, match=r"slow is 0\.5, but trials are ended when"):
        RealTrials(fake, 4, 9.0, slow=0.5)


def test_amp_takes_the_fastest_of_the_best_estimates_as_measured() -> None:
    fake = Fake({0: 3.0, 2: 1.0, 3: 2.0})
    plan = plan_amp(
        lowerings(SPEC), None, cluster=HET, host=Host(fake), trials=4, steps=ENOUGH_SLOW
    )
    assert len(fake.plans) == 4
    assert plan.predicted is not None
    assert (plan.predicted.source, plan.predicted.time_s) == ("measured", 1.0)
    assert plan.predicted.fits
    assert plan.pipeline == fake.plans[2].pipeline
    assert plan.mesh == fake.plans[2].mesh
    assert [one.predicted.time_s for one in plan.candidates] == [1.0, 2.0, 3.0]
    assert plan.reasons[0] == (
        "the 4 best estimates were tried, 3 ran, and of those this one is the fastest (number 3 "
        "by estimate)"
    )
    assert any(note.endswith("out of memory: error: no memory") for note in plan.notes)
    estimated = plan_amp(lowerings(SPEC), None, cluster=HET, simulate=0)
    assert fake.plans[0].mesh == estimated.mesh


def test_amp_says_that_no_trial_ran() -> None:
    with pytest.raises(
        PlanError, match=r"none of the plans with the 2 best estimates ran .*error: no memory"
    ):
        plan_amp(lowerings(SPEC), None, cluster=HET, host=Host(Fake({})), trials=2)


def test_program_without_a_model_cannot_be_tried() -> None:
    with pytest.raises(PlanError, match=r"name a model, as in .*--planner amp -O trials=10"):
        launch_of(None, "amp")
    with pytest.raises(PlanError, match=r"--planner random -O real=true"):
        launch_of(Host(), "random")
