"""The planners by name, as data: nothing is imported until it is used."""

from __future__ import annotations

from shardweave.ir.suggest import did_you_mean
from shardweave.passes.registry import GENERATED, PASSES

PLANNERS: dict[str, str] = {
    "amp": "shardweave.planners.amp:plan_amp",
    "auto": "shardweave.planners.auto:plan_auto",
    "axonn": "shardweave.planners.axonn:plan_axonn",
    "boosted-trees": "shardweave.planners.boosted_trees:plan_boosted_trees",
    "exhaustive": "shardweave.planners.exhaustive:plan_exhaustive",
    "megatron": "shardweave.planners.megatron.planner:plan_megatron",
    "oases": "shardweave.planners.oases:plan_oases",
    "oppa": "shardweave.planners.oppa:plan_oppa",
    "random": "shardweave.planners.random:plan_random",
    "replicated": "shardweave.planners.plan.replicated:plan_replicated",
}
"""`name` -> `module:function`; a planner takes a program and a mesh and returns a Plan."""


PLANNER_PREFIX = "plan-"

PASSES.update(
    {
        "apply-plan": "shardweave.planners.lowering.apply_plan:ApplyPlanPass",
        "cut-stages": "shardweave.planners.lowering.stages.cut_stages:CutStagesPass",
        "overlap-communication": (
            "shardweave.planners.overlap.overlap_communication:OverlapCommunicationPass"
        ),
    }
)
GENERATED.update(
    {
        PLANNER_PREFIX + name: f"shardweave.planners.lowering.planner_pass:{PLANNER_PREFIX}{name}"
        for name in PLANNERS
    }
)


DEFAULT_PLANNER = "auto"
"""Of the command `plan`."""


def no_such_plan(given: str) -> str:
    """What to say of a plan that is neither a planner's name nor a file."""
    return (
        f"plan '{given}' is neither a planner ({', '.join(PLANNERS)}) nor a file that exists; "
        f"{did_you_mean(given, PLANNERS)}give one of these."
    )
