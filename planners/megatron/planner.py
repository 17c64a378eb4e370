"""The planner `megatron`: Megatron-LM's expert rule, applied to any program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from xdsl.ir import SSAValue

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import (
    DimSharding,
    Placement,
    Sharding,
    contiguous,
    fits,
    is_even,
    ordered,
)
from shardweave.ir.program.program import Program
from shardweave.ir.suggest import did_you_mean
from shardweave.passes.prepare.projections import Place
from shardweave.passes.stages.batches import micro_batches_of
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.workload import batch_of
from shardweave.planners.lowering.apply_plan import is_layer_output
from shardweave.planners.lowering.lower import lowered
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.megatron.expert_cut import ExpertCut, expert_cut
from shardweave.planners.megatron.fused_projections import fused_cut
from shardweave.planners.megatron.input_cuts import SequenceCut, cut_images, sequence_cut
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import sharding_text
from shardweave.planners.plan.plan_parts import Pipeline, SplitProjection
from shardweave.planners.plan.replicated import batch_shardings, can_be_cut, idle_data
from shardweave.planners.plan.zero import DATA_AXIS, REPLICA_AXIS
from shardweave.planners.structure.linear_maps import Cut, input_embeddings, stored_cut
from shardweave.planners.structure.structure import parallel_pairs

CONTEXT, EXPERT, SPACE = "context", "expert", "space"
"""Default names of the axes over which sequences, experts and images are sharded."""


def plan_megatron(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster | None = None,
    tensor: str = "tensor",
    data: str = DATA_AXIS,
    replica: str = REPLICA_AXIS,
    context: str = CONTEXT,
    expert: str = EXPERT,
    space: str = SPACE,
    sequence_parallel: bool = False,
    attention_parts: int = 1,
    expert_load: float = 1.0,
) -> Plan:
    """Column- and row-parallel pairs on `tensor`, the batch on `data`, and on `replica` where the
    mesh has it (further replicas, over which ZeRO shards nothing).

    Pairs are found by structure (`planners.structure.structure`). Embeddings looked up by inputs,
    and an output projection whose logits are only read by sums and maxima, as in a cross entropy,
    are sharded along the vocabulary, and the loss is computed on the shards. Everything else is
    replicated. With `sequence_parallel`, values between pairs are sharded along dim 1 over
    `tensor`: all-reduces become a reduce-scatter and an all-gather, and norms run on shards.

    If the mesh has an axis `context`, inputs are sharded along the sequence over it
    (`planners.megatron.input_cuts`), and so is everything between them and the loss; attention
    gathers keys and values, in `attention_parts` parts whose results it merges (`split-attention`).

    If the mesh has an axis `space`, the height of images is sharded over it
    (`planners.megatron.input_cuts`); convolutions and pools read their neighbours' rows.

    If the mesh has an axis `expert`, the weights of experts are sharded over it, each expert on one
    device; all other layers treat the axis as a part of `data`. Each device then has tokens of its
    own, which are sent to the experts and back (`planners.megatron.expert_cut`). Costs assume
    `expert_load` times the rows of a balanced routing on each device.

    Without a mesh, `tensor` gets the largest number of a node's devices that divides the sizes of
    some parameter, and `data` the other devices (AMP, Sec. 4.1, without stages).

    Objective: none, it is a rule (Shoeybi et al. 2019; Korthikanti et al. 2022; stripes of the
    sequence, Brandon et al. 2023). Results equal the single-device program's on every mesh. Sizes
    that do not divide are sharded with padding on the last devices; so are heads, if there are more
    heads than devices. The weights of such heads are stored in contiguous shards and gathered for
    use. Notes say what stays replicated. Time: a few walks over the program.
    """
    if mesh is None:
        assert cluster is not None, "who calls gives a mesh or a cluster"
        degree = _node_degree(program, cluster, tensor)
        mesh = Mesh(**{data: cluster.num_devices // degree, tensor: degree})
    experts = expert_cut(program, mesh, expert)
    batch_axes = _batch_axes(program, mesh, (replica, data), expert if experts.parameters else "")
    inputs, notes = batch_shardings(program, mesh, *batch_axes)
    notes += [*idle_data(inputs, mesh, replica, data), *experts.notes]
    notes += _unused_axes(mesh, replica, data, tensor, context, expert, space)
    cut = sequence_cut(program, mesh, context, attention_parts)
    inputs = cut.inputs(program, inputs)
    inputs, of_images = cut_images(program, mesh, space, inputs)
    notes += [*cut.notes, *of_images]
    activations: dict[str, str] = {}
    by_tensor = _TensorCut({}, {}, [])
    if tensor in mesh.names and mesh.size(tensor) > 1:
        by_tensor = _tensor_cut(program, mesh, tensor, experts)
        notes += by_tensor.notes
        if sequence_parallel:
            activations, more = _sequence(program, mesh, tensor, batch_axes, cut)
            notes += more
    projections = by_tensor.projections
    cuts = _joined(by_tensor.parameters, experts.parameters)
    parameters, used = _stored_and_used(program, mesh, cuts, expert)
    names = {slot.value: slot.name for slot in program.arguments}
    for place in projections:
        name = names[place.value]
        parameters[name], used[name] = _stored_for_parts(place, tensor, mesh)
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        parameters=parameters,
        used=used,
        inputs=inputs,
        activations=activations,
        attention_parts=attention_parts if cut.placements else 1,
        expert_load=expert_load,
        projections={
            names[place.value]: SplitProjection(place.count, sharding_text(part, place.shape))
            for place, part in projections.items()
        },
        planner="megatron",
        notes=tuple(notes),
    )


def why_not_one_by_one(program: Program) -> str:
    """The reason why micro-batches cannot run one by one, such as batch norm; empty if they can.
    Partitions the global program once, with the fewest micro-batches that divide its batch."""
    count = next((n for n in divisors(batch_of(program)) if n > 1), 1)
    if count == 1:
        return ""
    plan = replace(plan_megatron(program, Mesh()), pipeline=Pipeline((("*",),), count))
    try:
        micro_batches_of(lowered(program, plan, PlanPasses.of(plan).partitioning))
    except ValueError as error:
        return str(error)
    return ""


class _TensorCut(NamedTuple):
    """Shardings over the tensor axis: of parameters by value, and of the parts of fused projections
    by their weight's place."""

    parameters: dict[SSAValue, Cut]
    projections: Mapping[Place, Cut]
    notes: list[str]


def _tensor_cut(program: Program, mesh: Mesh, tensor: str, experts: ExpertCut) -> _TensorCut:
    """Shard pairs and the vocabulary over the tensor axis, if it has more than one device."""
    uneven: dict[AtenOp, str] = {}
    projections: Mapping[Place, Cut] = {}
    size = mesh.size(tensor)
    parameters = parallel_pairs(program, tensor, size, uneven, stacked=experts.stacked)
    fused = None if experts.stacked else fused_cut(program, tensor, size, uneven)
    if fused is not None:
        parameters, uneven, projections = fused.parameters, fused.uneven, fused.weights
    notes = _uneven_notes(uneven, f"{tensor}={size}")
    _cut_vocabulary(program, tensor, mesh, parameters)
    if not parameters:
        notes.append(
            f"axis '{tensor}' of the mesh is idle: no parameter can be sharded over "
            f"{tensor}={size}, and its ranks all compute the same"
        )
    return _TensorCut(parameters, projections, notes)


def _unused_axes(mesh: Mesh, *known: str) -> list[str]:
    """Notes on mesh axes that the planner does not use; for an axis of size 1 only if its name is
    nearly one in `known`, the axes that the planner uses."""
    *names, last = (f"'{axis}'" for axis in known)
    return [
        f"axis '{axis.name}' of the mesh is idle: {did_you_mean(axis.name, known)}the planner uses "
        f"{', '.join(names)} and {last} alone"
        for axis in mesh.space_axes
        if axis.name not in known and (axis.size > 1 or did_you_mean(axis.name, known))
    ]


def _stored_for_parts(place: Place, tensor: str, mesh: Mesh) -> tuple[str, str]:
    """Shardings of a weight that is split in parts: stored in plain shards, read unsharded."""
    shape = shape_of(place.value)
    whole = Sharding.replicated(len(shape))
    stored = whole.with_dim(place.dim, contiguous([tensor], shape[place.dim], mesh))
    return sharding_text(stored.dims, shape), sharding_text(whole.dims, shape)


def _batch_axes(program: Program, mesh: Mesh, batch: Sequence[str], expert: str) -> list[str]:
    """The axes that shard the batch, including `expert` if all its devices then have a sample."""
    axes = [axis for axis in (*batch, expert) if axis in mesh.names]
    shapes = [shape_of(slot.value) for slot in program.arguments if slot.kind == "input"]
    is_short = any(shape and shape[0] < mesh.sizes(axes) for shape in shapes)
    return [axis for axis in axes if axis in batch] if is_short else axes


def _joined(a: Mapping[SSAValue, Cut], b: Mapping[SSAValue, Cut]) -> dict[SSAValue, Cut]:
    joined = dict(a)
    for value, cut in b.items():
        pairs = zip(joined.get(value, ((),) * len(cut)), cut, strict=True)
        joined[value] = tuple(ordered((*own, *more)) for own, more in pairs)
    return joined


def _stored_and_used(
    program: Program, mesh: Mesh, cuts: Mapping[SSAValue, Cut], expert: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Shardings of sharded parameters as stored, and as read where that does not follow."""
    parameters: dict[str, str] = {}
    used: dict[str, str] = {}
    for slot in program.arguments:
        if slot.value not in cuts:
            continue
        shape, read = shape_of(slot.value), cuts[slot.value]
        stored = stored_cut(read, shape, mesh)
        parameters[slot.name] = sharding_text(stored, shape)
        # What is stored over an axis of the batch is otherwise gathered.
        if stored != read or any(p.axis == expert for dim in read for p in dim):
            used[slot.name] = sharding_text(read, shape)
    return parameters, used


def _node_degree(program: Program, cluster: Cluster, tensor: str) -> int:
    """The largest tensor degree inside a node that divides some parameter."""
    inside = math.gcd(*(node.devices for node in cluster.nodes))
    divides = (n for n in reversed(divisors(inside)) if _divides_some(program, tensor, n))
    return next(divides, 1)


def _divides_some(program: Program, tensor: str, size: int) -> bool:
    cuts = parallel_pairs(program, tensor, size)
    return any(Sharding(cut).is_even(shape_of(value)) for value, cut in cuts.items())


def _uneven_notes(uneven: Mapping[AtenOp, str], axis: str) -> list[str]:
    why = "sharded in any other way, their weights would be gathered at each use"
    layers: dict[str, list[str]] = {}
    for op, what in uneven.items():
        layers.setdefault(what, []).append(f"'{layer_of(op)}'")
    return [
        f"{named[0]} stays whole: its {what} do not divide by {axis}, and {why}"
        if len(named) == 1
        else f"{named[0]} and {len(named) - 1} more linear maps, to {named[-1]}, stay whole: "
        f"their {what} do not divide by {axis}, and {why}"
        for what, named in layers.items()
    ]


def _cut_vocabulary(program: Program, tensor: str, mesh: Mesh, cuts: dict[SSAValue, Cut]) -> None:
    size = mesh.size(tensor)
    for _, table in input_embeddings(program):
        rows, _ = shape_of(table)
        if fits([Placement(tensor, size, -(-rows // size))], rows):
            cuts.setdefault(table, (contiguous([tensor], rows, mesh), ()))


def _sequence(
    program: Program, mesh: Mesh, tensor: str, batch: Sequence[str], cut: SequenceCut
) -> tuple[dict[str, str], list[str]]:
    """Shardings of the embeddings' outputs, which the residual stream then has too. Also returns
    notes on those that cannot be sharded."""
    outputs: dict[str, str] = {}
    notes: list[str] = []
    refused: set[str] = set()  # a layer may be looked up twice, by an encoder and a decoder
    size = mesh.size(tensor)
    embeddings = list(input_embeddings(program))
    returned = {
        (layer_of(op), shape_of(op.results[0]))
        for op in program.ops
        if phase_of(op) == "forward" and is_layer_output(op)
    }
    for op, _ in embeddings:
        layer, shape = layer_of(op), shape_of(op.results[0])
        if (layer, shape) not in returned:
            refused.add(layer)
            notes.append(f"no sequence parallelism from '{layer}': its output is not its lookup")
            continue
        dims = _cut_rows(shape[1], tensor, size, cut) if len(shape) == 3 else None
        if dims is None:
            refused.add(layer)
            notes.append(
                f"no sequence parallelism from '{layer}': its output {list(shape)} has no dim 1 "
                f"that divides by {tensor}={size}"
            )
            continue
        rows = contiguous(batch, shape[0], mesh) if can_be_cut(shape[0], batch, mesh) else ()
        outputs[layer] = sharding_text((rows, dims, ()), shape)
    if not embeddings:
        notes.append("sequence_parallel has no effect: no embedding of inputs was found")
    return {layer: text for layer, text in outputs.items() if layer not in refused}, notes


def _cut_rows(length: int, axis: str, size: int, cut: SequenceCut) -> DimSharding | None:
    """Shard a sequence over `axis`, within its context shards; None if it does not divide."""
    outer = cut.placements.get(length)
    if outer is None:
        outside, span = (), length
    else:
        # Stripes are the last digit of a position, plain shards the first.
        outside, span = (outer,), length if outer.stride == 1 else outer.stride
    placements = ordered((*outside, Placement(axis, size, span // size)))
    is_cut = span % size == 0 and fits(placements, length) and is_even(placements, length)
    return placements if is_cut else None
