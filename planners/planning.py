"""Making plans by planners, from files and from dicts, and predicting their steps on a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program, require_program
from shardweave.ir.sharding.rules import notes_on_rules
from shardweave.passes.pipeline import MeshLike, as_mesh
from shardweave.planners.call import (
    ClusterLike,
    call_planner,
    check_options,
    planner_options,
    require_cluster,
)
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.plan.plan import Plan, PlanError
from shardweave.planners.plan.plan_names import Lookup
from shardweave.planners.plan.replicated import batch_shardings, notes_on_empty_parts
from shardweave.planners.plan.zero import BATCH_AXES
from shardweave.planners.predict.predict import predicted_of, simulate_step
from shardweave.planners.registry import PLANNERS, no_such_plan
from shardweave.planners.simulate.update_cost import optimizer_class
from shardweave.planners.trials.trials import Host

PlanLike = Plan | str | Path | Mapping[str, str]
"""A plan, a planner's name, a JSON file's path, or shardings by name (or name pattern)."""


def plan(
    program: Program,
    mesh: MeshLike | None = None,
    planner: str = "",
    *,
    cluster: ClusterLike | None = None,
    host: Host | None = None,
    update: str = "",
    **options: Any,
) -> Plan:
    """Let a planner choose how to train a global program.

    planner: default "auto" with a cluster, else "megatron". mesh: None lets planners that can
    choose it do so, from the cluster's devices. cluster: a Cluster, a preset's name or a YAML file;
    with it, the plan holds the predicted time and memory of a step. host: lets planners run
    trials of plans (`driver.processes.trials.host_of`). update: name of a torch.optim class whose
    update and state are priced; "auto" also plans for it. options: the planner's own.

    Raises ValueError for an unknown planner or option, or if the planner needs a mesh or a
    cluster that is missing.
    """
    require_program(program)
    goal = None if mesh is None else as_mesh(mesh)
    planner = planner or ("megatron" if cluster is None else "auto")
    update = update and optimizer_class(update).__name__
    if update and "update" in planner_options(planner):
        options["update"] = update
    chosen = call_planner(planner, program, goal, cluster=cluster, host=host, options=options)
    chosen = with_update(chosen, update)
    if math.prod(chosen.mesh.values()) > 1:
        chosen = replace(chosen, notes=(*chosen.notes, *notes_on_rules(program.ops)))
    if cluster is None:
        return chosen
    return on_cluster(program, chosen, cluster)


def with_update(plan: Plan, update: str) -> Plan:
    """Set the plan's torch.optim class; its prediction is dropped unless it was measured."""
    update = update and optimizer_class(update).__name__
    if update in ("", plan.update):
        return plan
    is_measured = plan.predicted is not None and plan.predicted.source == "measured"
    return replace(plan, update=update, predicted=plan.predicted if is_measured else None)


def on_cluster(program: Program, plan: Plan, cluster: ClusterLike) -> Plan:
    """Add to the plan its predicted step on the cluster, unless it has been simulated or measured,
    and a note if devices stay idle."""
    goal, used = find_cluster(cluster), math.prod(plan.mesh.values())
    notes = dict.fromkeys(plan.notes)
    if used < goal.num_devices:
        idle = (
            f"the mesh {Mesh(**plan.mesh)} uses {used} of the {goal.num_devices} devices of "
            f"cluster '{goal.name}', and the others stay idle; give a mesh of all of them, or "
            "plan for a smaller cluster"
        )
        notes[idle] = None
    plan = replace(plan, notes=tuple(notes))
    if plan.predicted is not None and plan.predicted.source in ("simulated", "measured"):
        return plan
    return replace(plan, predicted=predicted_of(simulate_step(program, cluster, plan=plan)))


def mesh_of_plan(given: PlanLike | None) -> Mesh | None:
    """Return the mesh of a Plan or of a plan's file; None if it has none, or for other types."""
    if isinstance(given, str | Path) and str(given) not in PLANNERS and Path(given).is_file():
        given = Plan.load(given)
    if not isinstance(given, Plan):
        return None
    return Mesh(**given.mesh) if given.mesh else None


def check_resolvable(
    given: PlanLike, cluster: ClusterLike | None = None, *, sequence_parallel: bool = False
) -> None:
    """Raise ValueError for a plan or options that no program can have, before it is captured."""
    if not isinstance(given, Plan | str | Path | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"the plan is a {type(given).__name__}; give a planner's name, the path of a plan's "
            "file, a Plan, or a dict of shardings by parameter name."
        )
    if isinstance(given, str) and given in PLANNERS:
        require_cluster(given, cluster, is_mesh_given=True)
        check_options(given, _options(sequence_parallel))
    elif sequence_parallel:
        raise ValueError(
            "sequence_parallel is an option of planners, but a plan is given; name a planner "
            f"({', '.join(PLANNERS)}), or shard 'activations' in the plan."
        )


def _options(sequence_parallel: bool) -> dict[str, Any]:
    return {"sequence_parallel": True} if sequence_parallel else {}


def resolve_plan(
    given: PlanLike, program: Program, mesh: Mesh, *, sequence_parallel: bool = False
) -> Plan:
    """Turn a planner's name, a file, a dict of shardings or a Plan (returned as is) into a Plan.

    Names in a dict are names of parameters or, failing that, of inputs. Inputs without an entry are
    sharded along dim 0 over the axes "replica" and "data", if the mesh has them.
    Raises ValueError for a planner or file that does not exist, PlanError for a malformed plan.
    """
    check_resolvable(given, sequence_parallel=sequence_parallel)
    if isinstance(given, str) and given in PLANNERS:
        return plan(program, mesh, given, **_options(sequence_parallel))
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        values = cast("Mapping[object, object]", given)  # users give other values than text, too
        not_texts = [
            pair[0] for pair in values.items() if not all(isinstance(x, str) for x in pair)
        ]
        if not_texts:
            raise PlanError(
                "a plan given as a dict must map parameter names to shardings, such as "
                f"'[{{\"tensor\"}}, {{}}]', but '{not_texts[0]}' maps to something else. Give a "
                "whole plan as sw.Plan(..), sw.Plan.from_dict(..) or a file."
            )
        return _plan_by_name(given, program, mesh)
    if not Path(given).is_file():
        raise ValueError(no_such_plan(str(given)))
    return Plan.load(given)


def _plan_by_name(shardings: Mapping[str, str], program: Program, mesh: Mesh) -> Plan:
    names: dict[str, list[str]] = {"param": [], "input": []}
    for slot in program.arguments:
        names.get(slot.kind, []).extend((slot.name, *slot.aliases))
    not_parameters = Lookup(shardings).unmatched(names["param"])
    not_inputs = Lookup(shardings).unmatched(names["input"])
    # What fits neither stays with the parameters, where it is reported.
    of_inputs = {key: shardings[key] for key in not_parameters if key not in not_inputs}
    by_default, notes = batch_shardings(program, mesh, *BATCH_AXES)
    given = Lookup(of_inputs)
    rest = {name: text for name, text in by_default.items() if given.find(name) is None}
    built = Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        parameters={key: text for key, text in shardings.items() if key not in of_inputs},
        inputs=of_inputs | rest,
    )
    return replace(built, notes=(*notes, *notes_on_empty_parts(built, program)))
