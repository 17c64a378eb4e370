"""AMP's best estimates tried on real processes, as its paper tries ten of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardweave.planners.cost.quantity import counted
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, PlanError
from shardweave.planners.predict.predict import with_candidates
from shardweave.planners.trials.trials import Deadline, RealTrials, measured


def fastest_tried(
    trials: RealTrials,
    plans: Sequence[Plan],
    estimated: Sequence[Candidate],
    top: int,
    limit: Deadline,
) -> Plan:
    """The fastest plan as measured, and why some did not run. Raises PlanError if none runs."""
    names = [one.name for one in estimated]
    outcomes = list(limit.each(trials.run, plans))
    plans = plans[: len(outcomes)]
    ran = [index for index, one in enumerate(outcomes) if one.status == "ok"]
    failed = [
        f"{names[index]}: {one.status.replace('_', ' ')}: {one.message}"
        for index, one in enumerate(outcomes)
        if one.status != "ok"
    ]
    if not ran:
        best = counted(len(plans), "best estimate")
        raise PlanError(
            f"none of the {best} ran; try more, or give a longer time limit. {failed[0]}"
        )
    capacity = estimated[0].predicted.capacity_bytes
    tried = {i: replace(measured(outcomes[i]), capacity_bytes=capacity) for i in ran}
    ran.sort(key=lambda index: tried[index].time_s)
    rows = [Candidate(names[index], tried[index]) for index in ran]
    reason = (
        f"the {counted(len(plans), 'best estimate', 'was')} tried, {len(ran)} ran, and of those "
        f"this one is the fastest (number {ran[0] + 1} by estimate)"
    )
    plan = replace(plans[ran[0]], reasons=(reason, *plans[ran[0]].reasons))
    found = with_candidates(plan, rows[: max(1, top)])
    return replace(found, notes=(*found.notes, *failed))
