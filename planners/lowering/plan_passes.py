"""From a plan to the passes that carry it out."""

from __future__ import annotations

from collections.abc import Collection

from xdsl.passes import ModulePass

from shardweave.passes.registry import find_pass
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.lower import (
    DEFAULT_SCHEDULE,
    Lowering,
    finishing_of,
    partitioning_of,
    recomputation_of,
)
from shardweave.planners.plan.plan import Plan


def plan_passes(plan: Plan) -> list[ModulePass]:
    """All passes from a global program on a mesh to the local one that follows the plan."""
    return [*passes_before(plan), *passes_after(plan)]


def passes_before(plan: Plan) -> list[ModulePass]:
    """Those of `plan_passes` to the program that waits for every message where it stands."""
    return [ApplyPlanPass.of(plan), *_passes(partitioning_of(plan) + recomputation_of(plan))]


def passes_after(plan: Plan, names: Collection[str] = ()) -> list[ModulePass]:
    """The rest of `plan_passes`: which messages there are, and when they travel.

    names: of passes that a user has run in between; what they have done is not done again.
    """
    if not {"start-collectives", "overlap-communication"}.isdisjoint(names):
        return []
    return _passes([step for step in finishing_of(plan) if step[0] not in names])


def chosen_by(plan: Plan) -> set[str]:
    """The names of those of `plan_passes` that do what the plan chooses; the others every plan has,
    and they may well find nothing to do."""
    names = {"split-projections", "split-attention", "rematerialize"}
    # The functions of a pipeline are ordered one by one, and some may well send nothing.
    if plan.schedule not in ("", DEFAULT_SCHEDULE) and not plan.is_pipeline:
        names.add("overlap-communication")
    return names


def _passes(steps: Lowering) -> list[ModulePass]:
    return [find_pass(name)(**options) for name, options in steps]
