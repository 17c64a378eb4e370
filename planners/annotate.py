"""Attaching a plan's shardings to a program."""

from __future__ import annotations

from xdsl.ir import Attribute, Operation

from shardweave.ir.annotations import layer_of, phase_of, set_wanted_attrs
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Sharding
from shardweave.ir.program import USED, Program
from shardweave.ir.types import shape_of
from shardweave.planners.op_names import OP_MARK, named_ops
from shardweave.planners.plan import (
    Lookup,
    Plan,
    PlanError,
    check_names,
    parse_sharding,
    read_sharding,
)
from shardweave.planners.sharding_table import ShardingTable


def annotate(plan: Plan, program: Program) -> None:
    """Attach a plan's shardings. Raises PlanError for what the program or its mesh lacks."""
    given = program.mesh
    mesh = Mesh(**plan.mesh) if given is None else given.refined(plan.mesh)
    if mesh != given:
        program.set_mesh(mesh)
    check_names(plan, program)
    _annotate_arguments(plan, program, mesh)
    _annotate_layers(plan, program, mesh)
    _annotate_ops(plan, program, mesh)


def _annotate_arguments(plan: Plan, program: Program, mesh: Mesh) -> None:
    slots = program.arguments
    found: dict[int, Attribute | None] = {}
    for kind, entries in (("param", plan.parameters), ("input", plan.inputs)):
        table = ShardingTable(kind, entries)
        mine = {index: slot for index, slot in enumerate(slots) if slot.kind == kind}
        table.check_patterns(list(mine.values()))
        for index, slot in mine.items():
            given = table.entry(slot, mesh)
            if given is not None:
                found[index] = given
    program.set_argument_attributes("dist.sharding", found)
    _annotate_uses(plan, program, mesh)


def _annotate_uses(plan: Plan, program: Program, mesh: Mesh) -> None:
    """Mark the parameters that ops read in other shards than they are stored in."""
    slots = program.arguments
    batch = {
        placement.axis
        for slot in slots
        if slot.kind == "input" and shape_of(slot.value)
        for placement in program.sharding_of_slot(slot).dims[0]
    }
    table = ShardingTable("param", plan.used)
    table.check_patterns([slot for slot in slots if slot.kind == "param"])
    found: dict[int, Attribute | None] = {}
    for index, slot in enumerate(slots):
        if slot.kind != "param":
            continue
        shape, stored = shape_of(slot.value), program.sharding_of_slot(slot)
        given = table.entry(slot, mesh)
        if given is None:
            dims = (tuple(p for p in dim if p.axis not in batch) for dim in stored.dims)
            given = ShardingAttr.of(Sharding(tuple(dims)), shape)
        if given.on(shape, mesh) != stored:
            found[index] = given
    program.set_argument_attributes(USED, found)


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
        if key is None or phase_of(op) != "forward" or not _is_output(op):
            continue
        shape = shape_of(op.results[0])
        if len(shape) == len(wanted[key].dims):
            where = f"output of layer '{layer_of(op)}'"
            attribute = parse_sharding(plan.activations[key], shape, mesh, where)
            set_wanted_attrs(op, [attribute])
            missing.discard(key)
    for key in sorted(missing):
        raise PlanError(
            f"layer '{key}' has no output with as many dims as sharding {plan.activations[key]}."
        )


def _annotate_ops(plan: Plan, program: Program, mesh: Mesh) -> None:
    """Annotate the results of the ops that the plan names one by one."""
    wanted = {key: text for key, text in plan.activations.items() if OP_MARK in key}
    ops = named_ops(program) if wanted else {}
    for key, text in wanted.items():
        attribute = parse_sharding(text, shape_of(ops[key].results[0]), mesh, f"activation '{key}'")
        set_wanted_attrs(ops[key], [attribute])


def _is_output(op: Operation) -> bool:
    """Whether an op's single result leaves its layer in the forward pass."""
    if len(op.results) != 1:
        return False
    return any(
        layer_of(use.operation) != layer_of(op) and phase_of(use.operation) == "forward"
        for use in op.results[0].uses
    )
