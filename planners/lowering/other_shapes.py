"""Adapting a plan to the same model with inputs of other shapes, or in another mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import ArrayAttr
from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding, part_size
from shardweave.ir.program.blocks import shared_modules
from shardweave.ir.program.program import Program, Slot
from shardweave.planners.lowering.apply_plan import is_layer_output
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.lowering.stages.choose import fewer_micro_batches, rows_of
from shardweave.planners.lowering.stages.cut_stages import stages_of_layers
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import (
    OP_MARK,
    Lookup,
    attribute_text,
    named_ops,
    read_sharding,
    sharding_text,
)
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.plan.replicated import batch_shardings

Stored = Mapping[tuple[str, str], Sharding]
"""Stored shardings of parameters and buffers, by kind and name."""


@dataclass(frozen=True)
class FittedPlan:
    """A plan adapted to another program of the model, with notes on fields that do not fit it."""

    plan: Plan
    notes: list[str] = field(default_factory=list[str])


def fit_plan(
    plan: Plan, program: Program, mesh: Mesh, stored: Stored, batch_axes: Iterable[str]
) -> FittedPlan:
    """Adapt a plan to another global program of the same model on the same mesh.

    Parameters keep the shardings in which they are `stored`. Inputs and activations keep the plan's
    shardings if the shapes divide; otherwise they are replicated, and notes say so. batch_axes:
    axes over which the plan shards the batch. Takes time linear in the ops.
    """
    parameters, used = _parameters(plan, program, stored, set(batch_axes))
    inputs, notes = _inputs(plan, program, mesh, list(batch_axes))
    activations, more = _activations(plan, program, mesh)
    split, last = _batch_split(plan, program, mesh, inputs)
    has_loss = any(s.kind == "output" and not shape_of(s.value) for s in program.results)
    if plan.loss_chunks > 1 and not has_loss:
        notes.append("'loss_chunks' has no effect: no output is a loss")
    fitted = replace(
        plan,
        parameters=parameters,
        used=used,
        inputs=inputs,
        activations=activations,
        batch_split=split,
        loss_chunks=plan.loss_chunks if has_loss else 1,
        pipeline=_pipeline(plan, program, mesh, inputs),
    )
    notes += [*more, *last]
    if plan.passes and _derived_passes(fitted) != _derived_passes(plan):
        fitted = replace(fitted, passes="")
        notes.append("the plan's own passes are for another number of sub-batches, and are not run")
    return FittedPlan(fitted, notes)


def _derived_passes(plan: Plan) -> PlanPasses:
    return PlanPasses.of(replace(plan, passes=""))


def _pipeline(
    plan: Plan, program: Program, mesh: Mesh, inputs: Mapping[str, str]
) -> Pipeline | None:
    """The plan's stages, with at most its number of micro-batches, which divides the rows."""
    pipeline = plan.pipeline
    if pipeline is None:
        return None
    rows = rows_of(replace(plan, inputs=inputs), program, mesh)
    pipeline = replace(pipeline, stages=_with_other_layers(program, pipeline.stages))
    return fewer_micro_batches(pipeline, min(pipeline.micro_batches, rows), rows, mesh.num_stages)


def _with_other_layers(
    program: Program, stages: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """Add layers with parameters that no stage names: each to the stage with the layer that shares
    most enclosing modules with it (of several, the last stage), where its parameters are stored. A
    layer that shares none is not added: it follows the layer before it."""
    known = stages_of_layers(program, stages)
    owners = {
        name.rpartition(".")[0] for s in _slots(program, "param") for name in (s.name, *s.aliases)
    }
    layers_of = [list(names) for names in stages]
    for layer in program.layers():
        if layer in owners and layer not in known:
            shared = [max(shared_modules(layer, name) for name in names) for names in stages]
            if max(shared):
                layers_of[len(shared) - 1 - shared[::-1].index(max(shared))].append(layer)
    return tuple(map(tuple, layers_of))


def in_one_micro_batch(plan: Plan, mesh: Mesh) -> Plan:
    """Change a pipeline's plan to one micro-batch, the whole batch, and to derived passes. Raises
    PlanError if its schedule cannot do that, for example with a stage at several ranks."""
    assert plan.pipeline is not None
    return replace(
        plan, pipeline=fewer_micro_batches(plan.pipeline, 1, 1, mesh.num_stages), passes=""
    )


def _parameters(
    plan: Plan, program: Program, stored: Stored, batch_axes: set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the shardings of parameters as stored, and as ops read them, by name."""
    parameters: dict[str, str] = {}
    used: dict[str, str] = {}
    given = Lookup(plan.used)
    for slot in _slots(program, "param"):
        shape = shape_of(slot.value)
        sharding = stored.get(("param", slot.name), Sharding.replicated(len(shape)))
        parameters[slot.name] = sharding_text(sharding.dims, shape)
        read = given.find(slot.name, *slot.aliases)
        used[slot.name] = read or sharding_text(sharding.without(batch_axes).dims, shape)
    return parameters, used


def _inputs(
    plan: Plan, program: Program, mesh: Mesh, batch_axes: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Return shardings by input, and notes: the plan's where they fit, else dim 0 over the batch
    axes, for inputs that the plan shards or does not name."""
    by_default, notes = batch_shardings(program, mesh, *batch_axes)
    table = Lookup(plan.inputs)
    inputs: dict[str, str] = {}
    for slot in _slots(program, "input"):
        text = table.find(slot.name)
        if text is not None and _fits(read_sharding(text, slot.name), shape_of(slot.value), mesh):
            inputs[slot.name] = text
        elif slot.name in by_default and (text is None or _is_cut(text)):
            inputs[slot.name] = by_default[slot.name]
    return inputs, [note for note in notes if _is_planned(note, table)]


def _is_planned(note: str, table: Lookup) -> bool:
    """True if the plan shards the input that a note names, or has no entry for it."""
    text = table.find(note.split("'")[1])
    return text is None or _is_cut(text)


def _is_cut(text: str) -> bool:
    return any(dim.data for dim in read_sharding(text, "input").dims)


def _activations(plan: Plan, program: Program, mesh: Mesh) -> tuple[dict[str, str], list[str]]:
    """Return the plan's shardings of this program's layers and ops, on dims that divide."""
    layers = {k: v for k, v in plan.activations.items() if OP_MARK not in k}
    ops = {k: v for k, v in plan.activations.items() if OP_MARK in k}
    shapes: dict[str, set[tuple[int, ...]]] = {key: set() for key in plan.activations}
    table = Lookup(layers)
    for layer, members in program.layers().items() if layers else ():
        key = table.key(layer)
        if key is not None:
            shapes[key] |= {shape_of(op.results[0]) for op in members if _leaves_layer(op)}
    for name, op in named_ops(program).items() if ops else ():
        if name in ops:
            shapes[name] = {shape_of(op.results[0])}
    activations: dict[str, str] = {}
    dropped = 0
    for key, text in plan.activations.items():
        rank = len(read_sharding(text, f"activation '{key}'").dims)
        ranked = [shape for shape in shapes[key] if len(shape) == rank]
        fitted = _trimmed(text, ranked, mesh) if ranked else None
        if fitted is not None:
            activations[key] = fitted
        dropped += bool(ranked) and fitted != text
    notes = [f"{dropped} of the plan's shardings of activations do not fit these shapes"]
    return activations, notes if dropped else []


def _leaves_layer(op: Operation) -> bool:
    return phase_of(op) == "forward" and is_layer_output(op)


def _trimmed(text: str, shapes: Iterable[tuple[int, ...]], mesh: Mesh) -> str | None:
    """Drop a sharding's dims that do not divide in all of `shapes`; None if none are left."""
    given = read_sharding(text, "activation")
    whole = ShardingAttr.of(Sharding.replicated(len(given.dims)), (1,) * len(given.dims))
    trimmed = whole
    for dim in range(len(given.dims)):
        alone = _with_dim(whole, given, dim)
        if all(_fits(alone, shape, mesh) for shape in shapes):
            trimmed = _with_dim(trimmed, given, dim)
    if trimmed == given:
        return text
    return None if trimmed == whole else attribute_text(trimmed)


def _with_dim(attribute: ShardingAttr, other: ShardingAttr, dim: int) -> ShardingAttr:
    dims, strides = list(attribute.dims.data), list(attribute.strides.data)
    dims[dim], strides[dim] = other.dims.data[dim], other.strides.data[dim]
    cut = ArrayAttr(dims), ArrayAttr(strides), attribute.lengths
    return ShardingAttr(*cut, other.unreduced, other.reduction)


def _batch_split(
    plan: Plan, program: Program, mesh: Mesh, inputs: Mapping[str, str]
) -> tuple[int, list[str]]:
    """The plan's number of sub-batches if it divides each device's rows, else 1 with a note."""
    if plan.batch_split == 1:
        return 1, []
    for slot in _slots(program, "input"):
        shape = shape_of(slot.value)
        if not shape:
            continue
        text = inputs.get(slot.name)
        dims = read_sharding(text, "input").on(shape, mesh).dims if text else ((),)
        rows = part_size(dims[0], shape[0])
        if rows % plan.batch_split:
            note = (
                f"the {rows} rows of '{slot.name}' on a device are not split into sub-batches: "
                f"they do not divide by {plan.batch_split}"
            )
            return 1, [note]
    return plan.batch_split, []


def _slots(program: Program, kind: str) -> list[Slot]:
    return [slot for slot in program.arguments if slot.kind == kind]


def _fits(attribute: ShardingAttr, shape: tuple[int, ...], mesh: Mesh) -> bool:
    try:
        sharding = attribute.on(shape, mesh)
    except ValueError:
        return False
    return sharding.problem(shape, mesh) is None
