"""Passes plan-<planner>, one for each planner, with the planner's options."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any, cast, get_args

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.notes import note
from shardweave.planners.call import call_planner, planner_options
from shardweave.planners.lowering.apply_plan import annotate_shardings
from shardweave.planners.registry import PLANNER_PREFIX, PLANNERS

_PLAIN = (int, float, bool, str)


def __getattr__(name: str) -> type[ModulePass]:
    """Return the pass class of a planner by its registered name `plan-<planner>`."""
    planner = name.removeprefix(PLANNER_PREFIX)
    if planner == name or planner not in PLANNERS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return planner_pass(planner)


@cache
def planner_pass(planner: str) -> type[ModulePass]:
    """Make the class of pass `plan-<planner>`: it plans a global program and attaches shardings.

    Its options are the planner's, and `cluster` (a preset's name or a file). A program without a
    mesh takes the plan's. Fields of the plan other than shardings (sub-batches, recomputation, a
    schedule) are left to the passes that follow.
    """
    options = [
        (name, _field_type(option.annotation), _default(option.default))
        for name, option in planner_options(planner).items()
        if _field_type(option.annotation) is not None
    ]
    made = make_dataclass(
        f"Plan{planner.title().replace('-', '')}Pass",
        [("cluster", str, field(default="")), *options],
        bases=(ModulePass,),
        frozen=True,
        namespace={
            "name": PLANNER_PREFIX + planner,
            "apply": _apply_of(planner),
            "__doc__": f"Plan with '{planner}', as `apply-plan` would apply the plan.",
        },
    )
    return cast("type[ModulePass]", made)


def _apply_of(planner: str) -> Callable[[Any, Context, builtin.ModuleOp], None]:
    def apply(self: Any, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        mesh: Mesh | None = program.mesh
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        cluster = options.pop("cluster") or None
        plan = call_planner(planner, program, mesh, cluster=cluster, options=options)
        annotate_shardings(plan, program)
        for text in plan.undone:
            note(text)

    return apply


def _field_type(hint: Any) -> Any:
    """Type of the pass's field for a planner's option; None if no text can express its values."""
    kinds = set(get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    is_plain = kinds - {types.NoneType} <= set(_PLAIN)
    return hint if is_plain else None


def _default(value: Any) -> Any:
    return field() if value is inspect.Parameter.empty else field(default=value)
