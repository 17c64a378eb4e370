"""Megatron-LM's expert rule, applied to any program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.ir import SSAValue

from shardweave.ir.annotations import layer_of
from shardweave.ir.aten import AtenOp
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Placement, Sharding
from shardweave.ir.program import Program
from shardweave.ir.types import shape_of
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.plan import Plan
from shardweave.planners.replicated import batch_shardings, idle_data
from shardweave.planners.structure import Cut, input_embeddings, parallel_pairs


@dataclass(frozen=True)
class MegatronOptions:
    """Names of the axes, and whether activations between pairs are cut along the sequence."""

    tensor: str = "tensor"
    data: str = "data"
    sequence_parallel: bool = False


def plan_megatron(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster | None = None,
    tensor: str = "tensor",
    data: str = "data",
    sequence_parallel: bool = False,
) -> Plan:
    """Column- and row-parallel pairs on `tensor`, the batch on `data`.

    Pairs are found by structure (`planners.structure`); embeddings looked up by inputs, and an
    output projection whose logits only meet sums and maxima, are cut along the vocabulary, and
    the loss is computed on the shards. Everything else is whole. With `sequence_parallel`, what
    lies between pairs is cut along dim 1 over `tensor`: all-reduces become a reduce-scatter and
    an all-gather, and norms run on shards.

    Without a mesh, `tensor` takes the devices of a node of the cluster, the largest number of them
    over which anything divides, and `data` the rest (AMP, Sec. 4.1, without stages).

    Objective: none, it is a rule (Shoeybi et al. 2019; Korthikanti et al. 2022). Exact on every
    mesh; what does not divide stays whole and is noted. Time: a few walks over the program.
    """
    options = MegatronOptions(tensor, data, sequence_parallel)
    if mesh is None:
        assert cluster is not None, "who calls gives a mesh or a cluster"
        mesh = _node_mesh(program, cluster, options)
    inputs, notes = batch_shardings(program, mesh, data)
    notes += idle_data(inputs, mesh, data)
    notes += [
        f"axis '{axis.name}' of the mesh is idle: the rule uses '{data}' and '{tensor}' alone"
        for axis in mesh.space_axes
        if axis.size > 1 and axis.name not in (data, tensor)
    ]
    parameters: dict[str, str] = {}
    activations: dict[str, str] = {}
    if tensor in mesh.names and mesh.size(tensor) > 1:
        uneven: dict[AtenOp, str] = {}
        cuts = parallel_pairs(program, tensor, mesh.size(tensor), uneven)
        notes += _uneven_notes(uneven, f"{tensor}={mesh.size(tensor)}")
        _vocabulary(program, mesh, options, cuts, notes)
        for slot in program.arguments:
            if slot.value in cuts:
                parameters[slot.name] = sharding_text(cuts[slot.value], shape_of(slot.value))
        if not parameters:
            notes.append(
                f"axis '{tensor}' of the mesh is idle: no parameter can be cut over "
                f"{tensor}={mesh.size(tensor)}, and its ranks all compute the same"
            )
        if sequence_parallel:
            activations = _sequence(program, mesh, options, notes)
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        parameters=parameters,
        inputs=inputs,
        activations=activations,
        planner="megatron",
        notes=tuple(notes),
    )


def _node_mesh(program: Program, cluster: Cluster, options: MegatronOptions) -> Mesh:
    """Tensor parallelism inside the nodes, replicas between them."""
    inside = math.gcd(*(node.devices for node in cluster.nodes))
    degrees = [n for n in range(inside, 1, -1) if inside % n == 0]
    divides = (n for n in degrees if parallel_pairs(program, options.tensor, n))
    degree = next(divides, 1)
    return Mesh(**{options.data: cluster.num_devices // degree, options.tensor: degree})


def _uneven_notes(uneven: Mapping[AtenOp, str], axis: str) -> list[str]:
    """One note for each reason why linear maps stay whole."""
    layers: dict[str, list[str]] = {}
    for op, what in uneven.items():
        layers.setdefault(what, []).append(f"'{layer_of(op)}'")
    return [
        f"{named[0]} stays whole: its {what} do not divide by {axis}"
        if len(named) == 1
        else f"{named[0]} and {len(named) - 1} more linear maps, to {named[-1]}, stay whole: "
        f"their {what} do not divide by {axis}"
        for what, named in layers.items()
    ]


def _vocabulary(
    program: Program,
    mesh: Mesh,
    options: MegatronOptions,
    cuts: dict[SSAValue, Cut],
    notes: list[str],
) -> None:
    """Cut each embedding looked up by an input along its rows, where they divide."""
    size = mesh.size(options.tensor)
    for op, table in input_embeddings(program):
        rows, _ = shape_of(table)
        if rows % size:
            notes.append(
                f"embedding '{layer_of(op)}' stays whole: {rows} rows do not divide by "
                f"{options.tensor}={size}"
            )
        else:
            cuts.setdefault(table, ((Placement(options.tensor, size, rows // size),), ()))


def _sequence(
    program: Program, mesh: Mesh, options: MegatronOptions, notes: list[str]
) -> dict[str, str]:
    """Shardings of the embeddings' outputs, from which the residual stream takes its own."""
    found: dict[str, str] = {}
    refused: set[str] = set()  # a layer may be looked up twice, by an encoder and a decoder
    size = mesh.size(options.tensor)
    batch = f'"{options.data}"' if options.data in mesh.names else ""
    embeddings = list(input_embeddings(program))
    for op, _ in embeddings:
        shape = shape_of(op.results[0])
        if len(shape) != 3 or shape[1] % size:
            refused.add(layer_of(op))
            notes.append(
                f"no sequence parallelism from '{layer_of(op)}': its output {list(shape)} has no "
                f"dim 1 that divides by {options.tensor}={size}"
            )
            continue
        rows = batch if batch and shape[0] % mesh.size(options.data) == 0 else ""
        found[layer_of(op)] = f'[{{{rows}}}, {{"{options.tensor}"}}, {{}}]'
    if not embeddings:
        notes.append("sequence_parallel has no effect: no embedding of inputs was found")
    return {layer: text for layer, text in found.items() if layer not in refused}


def sharding_text(cut: Cut, shape: tuple[int, ...]) -> str:
    """The text of a cut as plans write it."""
    attribute = str(ShardingAttr.of(Sharding(cut), shape))
    return attribute.removeprefix("#dist.sharding<").removesuffix(">")
