"""From the many ways to name a plan to a Plan, and from a plan to the program of each rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from xdsl.passes import ModulePass

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.passes.apply_plan import ApplyPlanPass
from shardweave.passes.pipeline import PassPipeline, as_mesh
from shardweave.planners.plan import Plan, match
from shardweave.planners.registry import PLANNERS
from shardweave.planners.replicated import batch_shardings

PlanLike = Plan | str | Path | Mapping[str, str]
"""A plan, a planner's name, a JSON file's path, or shardings by name (or name pattern)."""

Passes = str | Iterable[ModulePass | str]

SHARDING_PASSES = "propagate-shardings,insert-collectives,cse,dce,merge-collectives"
ONE_DEVICE_PASSES = "cse,dce"
DATA_AXIS = "data"


def plan(
    program: Program,
    mesh: Mesh | Mapping[str, int] | str,
    planner: str = "megatron",
    **options: Any,
) -> Plan:
    """Let a planner choose how to shard a global program on a mesh.

    Raises ValueError for an unknown planner, or an option that it does not have.
    """
    target = PLANNERS.get(planner)
    if target is None:
        raise ValueError(f"there is no planner '{planner}'; use one of {', '.join(PLANNERS)}.")
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)
    known = [*inspect.signature(function).parameters][2:]  # after program and mesh
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"planner '{planner}' has no option '{unknown[0]}'; its options are "
            f"{', '.join(known) or 'none'}."
        )
    return function(program, as_mesh(mesh), **options)


def resolve_plan(
    given: PlanLike, program: Program, mesh: Mesh, *, sequence_parallel: bool = False
) -> Plan:
    """The Plan that `given` stands for, made by a planner, read from a file, or as it is.

    Shardings by name are those of parameters, and those that fit no parameter but an input
    that input's; other inputs are cut along dim 0 over the axis "data", if the mesh has it.
    """
    if isinstance(given, str) and given in PLANNERS:
        options = {"sequence_parallel": True} if sequence_parallel else {}
        return plan(program, mesh, given, **options)
    if sequence_parallel:
        raise ValueError(
            "sequence_parallel is an option of planners, not of a given plan; name a planner "
            f"({', '.join(PLANNERS)}), or shard 'activations' in the plan."
        )
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        return _plan_by_name(given, program, mesh)
    if not Path(given).is_file():
        raise ValueError(
            f"plan '{given}' is neither a planner ({', '.join(PLANNERS)}) nor a file that exists."
        )
    return Plan.load(given)


def _plan_by_name(shardings: Mapping[str, str], program: Program, mesh: Mesh) -> Plan:
    parameters, inputs = dict(shardings), {}
    for name in shardings:
        if not _fits(name, program, "param") and _fits(name, program, "input"):
            inputs[name] = parameters.pop(name)
    by_default, notes = batch_shardings(program, mesh, DATA_AXIS)
    rest = {name: text for name, text in by_default.items() if match(inputs, (name,)) is None}
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        parameters=parameters,
        inputs=inputs | rest,
        notes=tuple(notes),
    )


def _fits(pattern: str, program: Program, kind: str) -> bool:
    """Whether a name or pattern fits an argument of this kind."""
    return any(
        match({pattern: ""}, (slot.name, *slot.aliases)) is not None
        for slot in program.arguments
        if slot.kind == kind
    )


def partition(program: Program, mesh: Mesh, plan: Plan | None, passes: Passes = ()) -> Program:
    """The program that every rank of `mesh` runs: the default passes, then `passes`.

    Without a plan (for one device alone) the program is only cleaned up.
    """
    more = [passes] if isinstance(passes, str) else list(passes)
    if plan is None:
        return PassPipeline([ONE_DEVICE_PASSES, *more]).run(program)
    program = program.clone()
    program.set_mesh(mesh)
    return PassPipeline([ApplyPlanPass.of(plan), SHARDING_PASSES, *more]).run(program)
