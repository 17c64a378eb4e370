"""From a plan to the passes that carry it out."""

from __future__ import annotations

from xdsl.passes import ModulePass

from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.pipeline import pass_class
from shardweave.planners.lower import lowering_of
from shardweave.planners.plan import Plan


def plan_passes(plan: Plan) -> list[ModulePass]:
    """All passes from a global program on a mesh to the local one that follows the plan."""
    steps = [pass_class(name)(**options) for name, options in lowering_of(plan)]
    return [ApplyPlanPass.of(plan), *steps]
