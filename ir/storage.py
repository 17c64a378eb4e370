"""Which values share memory, and what of it the forward pass leaves to the rest of a step."""

from __future__ import annotations

from xdsl.ir import Attribute, Operation, OpResult, SSAValue

from shardweave.ir.annotations import phase_of
from shardweave.ir.dist import COLLECTIVES, DistOp, WaitOp
from shardweave.ir.facts import facts_of
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.strides import expected_strides, reshaped
from shardweave.ir.types import num_bytes, shape_of, tensor_type_of


def is_view(op: Operation) -> bool:
    """Whether an op's result shares the memory of its operand, so that it takes no time.

    A reshape does unless its operand's strides make it copy, as those of a permutation may.
    """
    facts = facts_of(op)
    if facts.view != "reshape":
        return facts.may_share
    source = op.operands[0]
    before, after = shape_of(source), shape_of(op.results[0])
    return reshaped(before, expected_strides(source), after) is not None


def shared_operand(op: Operation, position: int, mesh: Mesh | None = None) -> SSAValue | None:
    """The operand whose memory a result shares; None if the result has its own.

    A wait gives what the collective wrote, and a collective over axes of size 1 (of `mesh`, if
    that is known) does nothing.
    """
    if isinstance(op, DistOp):
        if isinstance(op, WaitOp):
            return op.operands[position]
        if isinstance(op, COLLECTIVES):
            is_alone = mesh is not None and mesh.sizes(op.axes) == 1
            return op.operands[position] if is_alone else None
    return op.operands[0] if is_view(op) else None


def storage_of(value: SSAValue, mesh: Mesh | None = None) -> SSAValue:
    """The value whose memory a value shares: itself, if it has its own."""
    while isinstance(value, OpResult):
        source = shared_operand(value.op, value.index, mesh)
        if source is None:
            break
        value = source
    return value


def layout_source(value: SSAValue) -> SSAValue:
    """The value whose elements a value shows, all of them, through views, copied or not."""
    while isinstance(value.owner, Operation) and facts_of(value.owner).is_layout:
        value = value.owner.operands[0]
    return value


def kept_values(program: Program) -> list[SSAValue]:
    """Results of forward ops that the rest of the step reads: what memory holds in between.

    Each sub-batch has its own beginning of the backward pass, so that the order of sub-batches
    does not change what is kept.
    """
    mesh = program.mesh
    made: set[SSAValue] = set()
    kept: dict[SSAValue, None] = {}
    turned: set[Attribute | None] = set()
    for op in program.ops:
        copy = op.properties.get("copy")
        if phase_of(op) in ("backward", "recompute"):
            turned.add(copy)
        if copy in turned or (copy is None and turned):
            storages = (storage_of(value, mesh) for value in op.operands)
            kept.update(dict.fromkeys(storage for storage in storages if storage in made))
        else:
            made.update(op.results)
    return list(kept)


def kept_bytes(program: Program) -> int:
    """Bytes of `kept_values` on one device."""
    return sum(num_bytes(tensor_type_of(value)) for value in kept_values(program))
