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
from shardweave.planners.plan import Lookup, Plan
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
    names: dict[str, list[str]] = {"param": [], "input": []}
    for slot in program.arguments:
        names.get(slot.kind, []).extend((slot.name, *slot.aliases))
    not_parameters = Lookup(shardings).unmatched(names["param"])
    not_inputs = Lookup(shardings).unmatched(names["input"])
    # What fits neither stays with the parameters, where it is reported.
    of_inputs = {key: shardings[key] for key in not_parameters if key not in not_inputs}
    by_default, notes = batch_shardings(program, mesh, DATA_AXIS)
    given = Lookup(of_inputs)
    rest = {name: text for name, text in by_default.items() if given.find(name) is None}
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        parameters={key: text for key, text in shardings.items() if key not in of_inputs},
        inputs=of_inputs | rest,
        notes=tuple(notes),
    )


def partition(program: Program, mesh: Mesh, plan: Plan | None, passes: Passes = ()) -> Program:
    """The program that every rank of `mesh` runs.

    `passes` come after the default ones, or in their place if `insert-collectives` is among
    them: then they are the whole way from the annotated program to the local one. Without a
    plan (for one device alone) the program is only cleaned up.
    """
    given = PassPipeline([passes] if isinstance(passes, str) else passes).passes
    if plan is None:
        return PassPipeline([ONE_DEVICE_PASSES, *given]).run(program)
    is_whole = any(one.name == "insert-collectives" for one in given)
    default = () if is_whole else (SHARDING_PASSES,)
    program = program.clone()
    program.set_mesh(mesh)
    return PassPipeline([ApplyPlanPass.of(plan), *default, *given]).run(program)
