"""Values that share memory, and the values that the forward pass keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache

from xdsl.ir import Attribute, BlockArgument, Operation, OpResult, SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp, overload_named
from shardweave.ir.dialects.dist import (
    AllReduceOp,
    CollectiveOp,
    DistOp,
    RingSliceOp,
    WaitOp,
    is_on_host,
)
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import num_bytes, shape_of, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.records.indexing import LOOKUP_GRADIENT
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.ops.strides import dense_strides, expected_strides, reshaped
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import is_composite, schema_of


def is_view(op: Operation) -> bool:
    """True if an op's result shares its operand's memory, so that the op takes no time. A reshape
    does so unless the operand's strides force a copy, as after a permutation."""
    if isinstance(op, RingSliceOp):
        return op.is_view
    facts = spec_of(op)
    if facts.view != "reshape":
        return facts.may_share
    source = op.operands[0]
    before, after = shape_of(source), shape_of(op.results[0])
    return reshaped(before, expected_strides(source), after) is not None


def copies(op: Operation) -> bool:
    """True if an op is a reshape that copies, because its operand's strides allow no view."""
    return spec_of(op).view == "reshape" and not is_view(op)


def shared_operand(op: Operation, position: int, mesh: Mesh | None = None) -> SSAValue | None:
    """The operand whose memory result `position` shares; None if the result has memory of its own.

    A wait returns the collective's results in place, and a collective over axes of size 1 in `mesh`
    (if given) does nothing.
    """
    if isinstance(op, DistOp):
        if isinstance(op, WaitOp):
            return op.operands[position]
        if isinstance(op, CollectiveOp):
            if op.JOINS_OPERANDS:
                return None
            is_alone = mesh is not None and mesh.sizes(op.axes) == 1
            return op.operands[position] if is_alone or reduces_in_place(op) else None
    return op.operands[0] if is_view(op) or adds_in_place(op) else None


def adds_in_place(op: Operation) -> bool:
    """True if an op adds a product to a tensor of the result's type that nobody else reads. The
    result is then written over that tensor."""
    product = spec_of(op).product
    if product is None or not product.plain or product.addend is None:
        return False
    assert isinstance(op, AtenOp)
    total = op.operands[product.addend]
    is_plain = op.value("beta") == 1 == op.value("alpha")
    return is_plain and total.type == op.results[0].type and is_unshared(total)


def reduces_in_place(op: Operation) -> bool:
    """True if an op is an all-reduce of a single value that nobody else reads. The result is then
    written over the operand. Several operands would be copied into one message."""
    return isinstance(op, AllReduceOp) and len(op.operands) == 1 and is_unshared(op.operands[0])


def is_unshared(value: SSAValue) -> bool:
    """True if a value has one reader and shares its memory with no other value that is read. Its
    reader may then overwrite it in place."""
    while value.has_one_use() and isinstance(value, OpResult):
        maker = value.op
        if isinstance(maker, FusedOp):
            value = maker.yielded[value.index]
            continue
        if spec_of(maker).view in ("expand", None):
            return isinstance(maker, AtenOp) and makes_memory(maker.name)
        value = maker.operands[0]
    return False


def added_rows(op: Operation) -> tuple[Operation, int] | None:
    """For an op that adds a lookup's gradient to an unshared table: that gradient's op, and the
    table's operand index; None for other ops.

    A kernel updates such a table in place, and only in the rows that change.
    """
    if op.name != "aten.add.Tensor":
        return None
    for number, table in enumerate(op.operands):
        gradient = op.operands[1 - number]
        maker = gradient.owner
        if isinstance(maker, AtenOp) and maker.name == LOOKUP_GRADIENT:
            is_alone = gradient.has_one_use() and table.has_one_use()
            is_alike = table.type == gradient.type
            is_dense = expected_strides(table) == dense_strides(shape_of(table))
            if is_alone and is_alike and is_dense and is_unshared(outside(table)):
                return maker, number
    return None


def overwritten_table(op: FusedOp) -> int | None:
    """Index of the operand that a fused region's kernel updates in place and returns, or None."""
    for inner in op.fused_ops:
        rows = added_rows(inner)
        if rows is not None:
            table = inner.operands[rows[1]]
            return table.index if isinstance(table, BlockArgument) else None
    return None


def outside(value: SSAValue) -> SSAValue:
    """Map an argument of a fused region to its operand outside; return other values unchanged."""
    if not isinstance(value, BlockArgument):
        return value
    region = value.block.parent_op()
    return region.operands[value.index] if isinstance(region, FusedOp) else value


def adds_its_result(op: Operation) -> bool:
    """True if an op can accumulate into existing memory instead of allocating its result. Matrix
    product libraries do so at no cost."""
    return op.name == "aten.mm"


@cache
def makes_memory(name: str) -> bool:
    """True if the results of an ATen op never alias its operands, by its schema. An op that torch
    composes of others, such as dropout, may return its operand."""
    overload = overload_named(name)
    if is_composite(overload):
        return False
    return all(part.alias_info is None for part in schema_of(overload).returns)


def storage_of(value: SSAValue, mesh: Mesh | None = None) -> SSAValue:
    """The value that owns the memory of `value`: itself if it has memory of its own."""
    while isinstance(value, OpResult):
        if isinstance(value.op, FusedOp):
            source = _source_of_region(value.op, value.index)
        else:
            source = shared_operand(value.op, value.index, mesh)
        if source is None or source is value:
            break
        value = source
    return value


def _source_of_region(op: FusedOp, position: int) -> SSAValue:
    """The operand, or the first result, whose memory a result of a region shares."""
    roots = [storage_of(value) for value in op.yielded[: position + 1]]
    root = roots[position]
    return outside(root) if isinstance(root, BlockArgument) else op.results[roots.index(root)]


def layout_source(value: SSAValue, *, in_place: bool = False) -> SSAValue:
    """Follow view and reshape ops back to the value whose elements they return, copied or not.
    in_place: stop at an op that copies."""
    while isinstance(value.owner, Operation) and spec_of(value.owner).is_layout:
        if in_place and copies(value.owner):
            break
        value = value.owner.operands[0]
    return value


def arguments_behind(value: SSAValue) -> Iterator[SSAValue]:
    """The arguments of the program that a value is computed from."""
    stack, seen = [value], {value}
    while stack:
        source = stack.pop()
        if not isinstance(source.owner, Operation):
            yield source
            continue
        fresh = [operand for operand in source.owner.operands if operand not in seen]
        seen.update(fresh)
        stack += fresh


def later_ops(program: Program) -> set[Operation]:
    """Ops from each sub-batch's first backward or recompute op on, where its forward pass ends."""
    later: set[Operation] = set()
    turned: set[Attribute | None] = set()
    for op in program.ops:
        copy = op.properties.get("copy")
        if phase_of(op) in ("backward", "recompute"):
            turned.add(copy)
        if copy in turned or (copy is None and turned):
            later.add(op)
    return later


def later_reads(
    program: Program, later: Collection[Operation]
) -> Iterator[tuple[Operation, SSAValue]]:
    """Yield (op of `later`, operand) for operands that other ops computed, if they are not on the
    host."""
    for op in program.ops:
        for value in op.operands if op in later else ():
            is_made = isinstance(value.owner, Operation) and value.owner not in later
            if is_made and not is_on_host(value):
                yield op, value


def kept_values(program: Program) -> list[SSAValue]:
    """Results of forward ops that `later_ops` read, once per memory: the activations kept."""
    roots = (
        storage_of(value, program.mesh) for _, value in later_reads(program, later_ops(program))
    )
    return list(dict.fromkeys(root for root in roots if isinstance(root, OpResult)))


def kept_bytes(program: Program) -> int:
    """Bytes of `kept_values` on one device."""
    return sum(num_bytes(tensor_type_of(value)) for value in kept_values(program))
