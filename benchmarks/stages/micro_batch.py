"""The plan of one micro-batch of a plan with stages: its shardings alone, on less of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.workload import batch_of
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import Lookup, read_sharding
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.plan.zero import BATCH_AXES, DATA_AXIS, REPLICA_AXIS


def micro_batch_plan(plan: Plan, program: Program) -> Plan:
    """A plan without stages whose ranks each run what a rank of `plan` runs of one micro-batch.

    The micro-batches stand side by side on a longer data axis, so that any backend's partitioning
    gives a rank's program. Collectives over that axis are those that a step has once, or between
    replicas. Raises PlanError if the batch does not divide, or parameters are cut over `data`.
    """
    for name, text in plan.parameters.items():
        if _names_data(text, name):
            raise PlanError(
                f"parameter '{name}' is cut over '{DATA_AXIS}', which a plan with stages or ZeRO "
                "says by 'zero': 3; leave the axis out of its sharding."
            )
    plan = _with_one_batch_axis(plan)
    micro_batches = plan.pipeline.micro_batches if plan.pipeline else 1
    pieces = plan.mesh.get(DATA_AXIS, 1) * micro_batches
    replicas = math.prod(plan.mesh.get(axis, 1) for axis in BATCH_AXES)
    mesh = {axis.name: axis.size for axis in Mesh(**plan.mesh).space_axes}
    found = Plan(
        mesh={DATA_AXIS: pieces, **{axis: n for axis, n in mesh.items() if axis != DATA_AXIS}},
        parameters=plan.parameters,
        inputs=plan.inputs,
        activations=plan.activations,
        batch_split=plan.batch_split,
        attention_parts=plan.attention_parts,
        loss_chunks=plan.loss_chunks,
        projections=plan.projections,
        recompute=plan.recompute,
    )
    if micro_batches == 1:
        return found
    batch = batch_of(program)
    if batch % (replicas * micro_batches):
        raise PlanError(
            f"the batch of {batch} does not divide into {micro_batches} micro-batches on each of "
            f"{replicas} replicas; use micro-batches that divide it."
        )
    return replace(found, inputs=_inputs(plan, program), activations=_cut_all(plan.activations))


def _with_one_batch_axis(plan: Plan) -> Plan:
    """The plan with further replicas as part of the data axis: ranks run the same, so that plans
    that differ in groups of replicas alone are partitioned once. The plan itself if it cuts
    anything over one of the two axes alone."""
    replicas = plan.mesh.get(REPLICA_AXIS, 1)
    both = f'"{REPLICA_AXIS}", "{DATA_AXIS}"'

    def joined(shardings: Mapping[str, str]) -> dict[str, str]:
        return {name: text.replace(both, f'"{DATA_AXIS}"') for name, text in shardings.items()}

    found = replace(
        plan,
        mesh={axis: n for axis, n in plan.mesh.items() if axis != REPLICA_AXIS}
        | {DATA_AXIS: replicas * plan.mesh.get(DATA_AXIS, 1)},
        inputs=joined(plan.inputs),
        activations=joined(plan.activations),
    )
    texts = (*plan.parameters.values(), *plan.inputs.values(), *plan.activations.values())
    alone = any(axis in text.replace(both, "") for text in texts for axis in BATCH_AXES)
    return plan if alone or replicas == 1 else found


def _inputs(plan: Plan, program: Program) -> dict[str, str]:
    """Every input's sharding, with dim 0 over the data axis too."""
    given = Lookup(plan.inputs)
    found: dict[str, str] = {}
    for slot in program.arguments:
        shape = shape_of(slot.value)
        if slot.kind == "input" and shape:
            text = given.find(slot.name, *slot.aliases)
            found[slot.name] = text or f"[{', '.join(['{}'] * len(shape))}]"
    return _cut_all(found)


def _cut_all(shardings: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text if _names_data(text, name) else _cut(text) for name, text in shardings.items()
    }


def _names_data(text: str, name: str) -> bool:
    dims = read_sharding(text, f"'{name}'").dims
    return any(axis.data == DATA_AXIS for dim in dims for axis in dim)


def _cut(text: str) -> str:
    """A sharding's text with dim 0 over the data axis before what cuts it already."""
    head, brace, rest = text.partition("{")
    comma = "" if rest.lstrip().startswith("}") else ", "
    return f'{head}{brace}"{DATA_AXIS}"{comma}{rest}'
