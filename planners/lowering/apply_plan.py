"""Pass `apply-plan`: annotates a program with a plan's shardings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import layer_of, phase_of, set_wanted_attrs
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement, Sharding, is_even
from shardweave.ir.program.program import PART, PARTS, USED, Program
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.passes.program_pass import PassOnProgram
from shardweave.planners.lowering.stages.choose import devices_of_plan
from shardweave.planners.lowering.stages.cut_stages import store_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import (
    OP_MARK,
    Lookup,
    argument_shardings,
    check_names,
    named_ops,
    parse_sharding,
    read_sharding,
)
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.plan.zero import DATA_AXIS, REPLICA_AXIS


def annotate_shardings(plan: Plan, program: Program) -> None:
    """Annotate a program with a plan's shardings and stages. PlanError if they do not fit."""
    given = program.mesh
    mesh = Mesh(**plan.mesh) if given is None else given.refined(plan.mesh)
    if mesh != given:
        program.set_mesh(mesh)
    check_names(plan, program)
    _annotate_arguments(plan, program, mesh)
    _annotate_layers(plan, program, mesh)
    _annotate_ops(plan, program, mesh)
    if plan.is_pipeline and plan.pipeline is not None:
        store_stages(program, plan.pipeline.stages)
        program.set_devices(devices_of_plan(plan, mesh))


def _annotate_arguments(plan: Plan, program: Program, mesh: Mesh) -> None:
    """Annotate arguments with stored shardings, and gathered parameters also with used ones."""
    stored = argument_shardings(program, "param", plan.parameters, mesh)
    stored |= argument_shardings(program, "input", plan.inputs, mesh)
    program.set_argument_attributes("dist.sharding", stored)
    slots, batch = program.arguments, _batch_axes(program)
    used = argument_shardings(program, "param", plan.used, mesh)
    shardings: dict[int, ShardingAttr] = {}
    for index, slot in enumerate(slots):
        if slot.kind != "param":
            continue
        shape, sharding = shape_of(slot.value), program.sharding_of_slot(slot)
        gathered = tuple(tuple(p for p in dim if p.axis not in batch) for dim in sharding.dims)
        read = used.get(index) or ShardingAttr.of(Sharding(gathered), shape)
        if read.on(shape, mesh) != sharding:
            shardings[index] = read
    program.set_argument_attributes(USED, shardings)
    if plan.zero:
        # Experts are read in their stored shards over a batch axis, and ZeRO divides these.
        others = {i for i in used if program.sharding_of_slot(slots[i]).axes.isdisjoint(batch)}
        _divide_parameters(program, mesh, shardings.keys() | others)
    if plan.projections:
        _annotate_projections(plan, program)


def _annotate_projections(plan: Plan, program: Program) -> None:
    """Annotate weights of fused projections with the number of maps to split them into."""
    table = Lookup(dict.fromkeys(plan.projections, ""))
    keys = {
        index: table.key(slot.name, *slot.aliases)
        for index, slot in enumerate(program.arguments)
        if slot.kind == "param" and len(shape_of(slot.value)) > 1
    }
    projections = {index: plan.projections[key] for index, key in keys.items() if key is not None}
    counts = {index: to_attribute(p.parts) for index, p in projections.items()}
    program.set_argument_attributes(PARTS, counts)
    used = {
        index: read_sharding(p.used, f"projection '{keys[index]}'")
        for index, p in projections.items()
        if p.used
    }
    program.set_argument_attributes(PART, used)


def zero_axes(program: Program) -> tuple[str, ...]:
    """Axes that ZeRO shards over: "data", and axes that shard the batch except "replica"."""
    axes = {DATA_AXIS, *_batch_axes(program)} - {REPLICA_AXIS}
    return tuple(axis.name for axis in program.needed_mesh().space_axes if axis.name in axes)


def _batch_axes(program: Program) -> set[str]:
    """The axes that shard dim 0 of an input."""
    return {
        placement.axis
        for slot in program.arguments
        if slot.kind == "input" and shape_of(slot.value)
        for placement in program.sharding_of_slot(slot).dims[0]
    }


def _divide_parameters(program: Program, mesh: Mesh, used: Collection[int]) -> None:
    """Store parameters for ZeRO: also sharded over the replicas, and read as before.

    A parameter stays as it is if it does not divide, has no elements, or its index is in `used`
    (the plan then already says how it is stored and read, for example after `fit_plan`). Raises
    PlanError for a mesh of several devices without an axis to shard over.
    """
    axes = zero_axes(program)
    if not axes and mesh.num_devices > 1:
        raise PlanError(
            f"the plan asks for ZeRO, which divides parameters over the axis '{DATA_AXIS}', but "
            f"the mesh {mesh} has no such axis; add the axis to the mesh, or set zero to 0."
        )
    stored: dict[int, ShardingAttr] = {}
    read: dict[int, ShardingAttr] = {}
    for index, slot in enumerate(program.arguments):
        if slot.kind != "param" or index in used:
            continue
        shape, sharding = shape_of(slot.value), program.sharding_of_slot(slot)
        finer = sharding
        for axis in axes:
            finer = divided_over(finer, shape, axis, mesh) or finer
        if finer != sharding:
            stored[index] = ShardingAttr.of(finer, shape)
            read[index] = ShardingAttr.of(sharding, shape)
    program.set_argument_attributes("dist.sharding", stored)
    program.set_argument_attributes(USED, read)


def divided_over(
    sharding: Sharding, shape: Sequence[int], axis: str, mesh: Mesh
) -> Sharding | None:
    """Shard further over `axis`, along the first dim whose size divides; None if there is none.

    A dim that other axes shard unevenly is left, since DTensor stores no finer shards of it.
    """
    size = mesh.size(axis)
    if 0 in shape:
        return None
    for dim, placements in enumerate(sharding.dims):
        stride = min((p.stride for p in placements), default=shape[dim])
        is_free = axis not in sharding.axes and is_even(placements, shape[dim])
        if is_free and stride % size == 0:
            return sharding.with_dim(dim, (*placements, Placement(axis, size, stride // size)))
    return None


def _annotate_layers(plan: Plan, program: Program, mesh: Mesh) -> None:
    """Annotate each layer's outputs that have as many dims as the sharding given for it."""
    table = Lookup({k: v for k, v in plan.activations.items() if OP_MARK not in k})
    keys = {layer: table.key(layer) for layer in program.layers()}
    wanted = {
        key: read_sharding(plan.activations[key], f"layer '{key}'")
        for key in keys.values()
        if key is not None
    }
    missing = set(wanted)
    for op in program.ops:
        key = keys[layer_of(op)]
        if key is None or phase_of(op) != "forward" or not is_layer_output(op):
            continue
        shape = shape_of(op.results[0])
        if len(shape) == len(wanted[key].dims):
            where = f"output of layer '{layer_of(op)}'"
            attribute = parse_sharding(plan.activations[key], shape, mesh, where)
            set_wanted_attrs(op, [attribute])
            missing.discard(key)
    for key in sorted(missing):
        raise PlanError(
            f"the plan shards activations of layer '{key}' as {plan.activations[key]}, but no "
            "output of the layer has that number of dims; give one {...} per dim."
        )


def _annotate_ops(plan: Plan, program: Program, mesh: Mesh) -> None:
    wanted = {key: text for key, text in plan.activations.items() if OP_MARK in key}
    ops = named_ops(program) if wanted else {}
    for key, text in wanted.items():
        attribute = parse_sharding(text, shape_of(ops[key].results[0]), mesh, f"activation '{key}'")
        set_wanted_attrs(ops[key], [attribute])


def is_layer_output(op: Operation) -> bool:
    """True if an op has one result, which another layer reads in the forward pass."""
    if len(op.results) != 1:
        return False
    return any(
        layer_of(use.operation) != layer_of(op) and phase_of(use.operation) == "forward"
        for use in op.results[0].uses
    )


@dataclass(frozen=True)
class ApplyPlanPass(PassOnProgram):
    """Annotate parameters, inputs and layer outputs with the shardings of a plan.

    The plan is read from `file`, or given as JSON text in `json`. A program without a mesh
    takes the plan's. The plan's `parameters` are shardings as stored. Its `used` are shardings
    as ops read them (`dist.used`); without an entry, axes that shard the batch (dim 0 of an
    input) are gathered before use, as in FSDP. A pattern applies to parameters with as many dims as
    its sharding.

    A plan whose axes factor the axes of the program's mesh (tensor.0=2,tensor.1=2 for tensor=4)
    refines the mesh.

    Requires: a global program before `propagate-shardings` that has what the plan names.
    Ensures: arguments named by the plan carry `dist.sharding` (and `dist.used`), layer outputs
    `wanted`; numerics unchanged.
    """

    name = "apply-plan"
    file: str = ""
    json: str = ""

    @staticmethod
    def of(plan: Plan) -> ApplyPlanPass:
        return ApplyPlanPass(json=plan.to_json())

    def run(self, program: Program) -> None:
        if bool(self.file) == bool(self.json):
            raise ValueError(
                'apply-plan needs one of file="plan.json" and json="..."; give exactly one.'
            )
        check_not_propagated(program, self.name)
        annotate_shardings(
            Plan.load(self.file) if self.file else Plan.from_json(self.json), program
        )
