"""Registry of planners by name; a planner's module is imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shardweave.ir.suggest import did_you_mean
from shardweave.passes.registry import GENERATED, PASSES

PLANNERS: dict[str, str] = {
    "amp": "shardweave.planners.amp.planner:plan_amp",
    "auto": "shardweave.planners.auto.planner:plan_auto",
    "axonn": "shardweave.planners.axonn.planner:plan_axonn",
    "megatron": "shardweave.planners.megatron.planner:plan_megatron",
    "oases": "shardweave.planners.oases.planner:plan_oases",
    "oppa": "shardweave.planners.oppa.planner:plan_oppa",
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


def _add_pass(planner: str) -> None:
    name = PLANNER_PREFIX + planner
    GENERATED[name] = f"shardweave.planners.lowering.planner_pass:{name}"


for _name in PLANNERS:
    _add_pass(_name)

Planner = TypeVar("Planner", bound=Callable[..., Any])


def register_planner(name: str, function: Planner) -> Planner:
    """Register a planner under a name: for `sw.plan`, `sw.compile` and as pass `plan-<name>`.

    function: takes a program, a mesh (None if its annotation allows that) and, as keywords,
    `cluster`, `host` and its options; it must be defined at the top of its module. Registering it
    again is allowed. Raises ValueError if another planner has the name, or for a nested function.
    """
    target = f"{function.__module__}:{function.__qualname__}"
    if PLANNERS.get(name, target) != target:
        raise ValueError(
            f"there is a planner '{name}' already, {PLANNERS[name]}; give {target} another name."
        )
    if "<" in target:
        raise ValueError(f"{target} is nested in a function; define it at its module's top level.")
    PLANNERS[name] = target
    _add_pass(name)
    return function


DEFAULT_PLANNER = "auto"
"""Planner that the command `plan` uses by default."""


def no_such_plan(given: str) -> str:
    """Write the error message for a plan that is neither a planner's name nor a file."""
    return (
        f"plan '{given}' is neither a planner ({', '.join(PLANNERS)}) nor a file that exists; "
        f"{did_you_mean(given, PLANNERS)}give one of these."
    )
