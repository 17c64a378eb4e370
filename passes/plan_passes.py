"""From a plan to the passes that carry it out."""

from __future__ import annotations

from xdsl.passes import ModulePass

from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.pipeline import pass_class
from shardweave.planners.lower import Lowering, annotation_steps, lowering_of
from shardweave.planners.plan import Plan


def annotating_passes(plan: Plan) -> list[ModulePass]:
    """What makes a global program say all that the plan decides on shardings and sub-batches."""
    return [ApplyPlanPass.of(plan), *_passes(annotation_steps(plan))]


def plan_passes(plan: Plan) -> list[ModulePass]:
    """All passes from a global program on a mesh to the local one that follows the plan.

    Raises PlanError for what no backend can run yet.
    """
    return [ApplyPlanPass.of(plan), *_passes(lowering_of(plan))]


def _passes(steps: Lowering) -> list[ModulePass]:
    return [pass_class(name)(**options) for name, options in steps]
