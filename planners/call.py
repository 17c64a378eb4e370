"""Calling planners by name, each with only the arguments that its function takes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.replicated import notes_on_empty_parts
from shardweave.planners.registry import PLANNERS

if TYPE_CHECKING:
    from shardweave.planners.trials.trials import Host

GIVEN = ("program", "mesh", "cluster", "cluster_name", "host")
"""Parameters of planner functions that are not options for the user."""

ClusterLike = Cluster | str | Path


def planner_function(name: str) -> Callable[..., Plan]:
    """Return the function of a registered planner. Raises ValueError for an unknown name."""
    target = PLANNERS.get(name)
    if target is None:
        raise ValueError(
            f"there is no planner '{name}'; {did_you_mean(name, PLANNERS)}use one of "
            f"{', '.join(PLANNERS)}."
        )
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def planner_options(name: str) -> dict[str, inspect.Parameter]:
    """Return a planner's options by name, with their defaults and with types as annotations.
    Options are parameters of the planner's function, or fields of its dataclass `options`."""
    return _options_of(planner_function(name))


def _options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(function)
    options: dict[str, inspect.Parameter] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if key == "options":
            options |= _options_of(hints[key])
        elif key not in GIVEN:
            options[key] = parameter.replace(annotation=hints.get(key, str))
    return options


def chooses_mesh(name: str) -> bool:
    """True if a planner can be called without a mesh, and then chooses one."""
    hint = get_type_hints(planner_function(name)).get("mesh")
    return types.NoneType in get_args(hint)


def require_cluster(name: str, cluster: ClusterLike | None, *, is_mesh_given: bool) -> None:
    """Raise ValueError if a planner needs a cluster and `cluster` is None."""
    parameter = inspect.signature(planner_function(name)).parameters.get("cluster")
    if cluster is not None or parameter is None:
        return
    if parameter.default is inspect.Parameter.empty or not is_mesh_given:
        raise ValueError(
            f"planner '{name}' needs a cluster; give a preset's name or a file to `shardweave "
            "plan --cluster` or to sw.plan(cluster=..), then run the resulting plan."
        )


def call_planner(
    name: str,
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: ClusterLike | None = None,
    host: Host | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Call a planner and return its plan.

    mesh: None lets the planner choose, if it can. cluster: the hardware to plan for. The plan's
    notes also name mesh axes that leave shards of an input empty. Raises ValueError for an unknown
    planner or option, or if the planner needs a mesh or a cluster that is missing.
    """
    function = planner_function(name)
    known = inspect.signature(function).parameters
    check_options(name, options or {})
    if mesh is None and not chooses_mesh(name):
        raise ValueError(
            f"planner '{name}' does not choose a mesh; give a mesh, as data=2,tensor=2."
        )
    extra: dict[str, Any] = {}
    if "cluster" in known:
        require_cluster(name, cluster, is_mesh_given=mesh is not None)
        if cluster is not None:
            extra["cluster"] = find_cluster(cluster)
            if "cluster_name" in known and not isinstance(cluster, Cluster):
                extra["cluster_name"] = str(cluster)
    if "host" in known:
        extra["host"] = host
    if "options" in known:
        extra["options"] = get_type_hints(function)["options"](**(options or {}))
    else:
        extra |= options or {}
    plan = function(program, mesh, **extra)
    if not plan.cluster and isinstance(cluster, str | Path):
        plan = replace(plan, cluster=str(cluster))
    return replace(plan, notes=(*plan.notes, *notes_on_empty_parts(plan, program)))


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown option, or a value that is negative or of the wrong type."""
    known = planner_options(name)
    for option, value in options.items():
        if option not in known:
            others = [other for other in PLANNERS if option in planner_options(other)]
            elsewhere = f", which is one of {', '.join(others)}" if others else ""
            raise ValueError(
                f"planner '{name}' has no option '{option}'{elsewhere}; "
                f"{did_you_mean(option, known)}its options are "
                f"{', '.join(known) or 'none'}."
            )
        kinds = get_args(known[option].annotation) or (known[option].annotation,)
        if not any(_is_of(value, kind) for kind in kinds):
            shown = " or ".join(_KINDS.get(kind, str(kind)) for kind in kinds)
            raise ValueError(f"planner '{name}': option '{option}' is {value!r}, expected {shown}.")
        if isinstance(value, int | float) and not value >= 0:  # nor is NaN
            raise ValueError(f"planner '{name}': option '{option}' is {value}, expected 0 or more.")


_KINDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "none",
}


def _is_of(value: object, kind: Any) -> bool:
    """True if an option's value has type `kind`; an int is also a float, a bool is neither."""
    if kind not in _KINDS:
        return True
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
