"""Lookups of rows that follow each other, as the slices that they are.

A table of positions is looked up at 0, 1, 2, ..: that reads the table as it lies. The gradient of
such a lookup sets each row once, so that it is a slice's, and of all rows the operand itself.
"""

from __future__ import annotations

import math

from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.annotations import annotate
from shardweave.ir.aten import AtenOp, create
from shardweave.ir.dead_code import remove_dead_ops
from shardweave.ir.facts import facts_of
from shardweave.ir.program import Program
from shardweave.ir.types import dtype_of_value, shape_of, tensor_type


def slice_lookups(program: Program) -> int:
    """Replace lookups at consecutive indices, and gradients of such; returns how many. Linear."""
    count = 0
    for op in list(program.ops):
        if isinstance(op, AtenOp) and op.name in _REPLACED:
            count += _REPLACED[op.name](op, program.return_op)
    remove_dead_ops(program)
    return count


def _replace_lookup(op: AtenOp, end: Operation) -> bool:
    table, places = op.operands
    num_rows, width = shape_of(table)
    start, count = _first(places), math.prod(shape_of(places))
    # What is returned is in memory of its own, and not the table's.
    if start is None or start + count > num_rows or _reaches(op.results[0], end):
        return False
    rows = table
    if count < num_rows:
        rows = _add(op, "aten.slice.Tensor", rows, (count, width), dim=0, start=start)
    _replace(op, rows)
    return True


def _replace_gradient(op: AtenOp, end: Operation) -> bool:
    gradient, places = op.operands
    num_rows, width = shape_of(op.results[0])
    start, count = _first(places), math.prod(shape_of(places))
    if start is None or start + count > num_rows or op.value("scale_grad_by_freq"):
        return False
    if start <= op.value("padding_idx") < start + count:
        return False
    if count == num_rows and not gradient.has_one_use():
        return False  # two gradients would be one tensor
    rows = _add(op, "aten.view", gradient, (count, width))
    if count < num_rows:
        shape = (num_rows, width)
        rows = _add(op, "aten.slice_backward", rows, shape, dim=0, start=start, step=1)
    _replace(op, rows)
    return True


_REPLACED = {
    "aten.embedding": _replace_lookup,
    "aten.embedding_dense_backward": _replace_gradient,
}


def _first(places: SSAValue) -> int | None:
    """The first of indices that count up by 1, in the order of their elements; None of others."""
    owner = places.owner
    while isinstance(owner, AtenOp) and facts_of(owner).view == "reshape":
        owner = owner.operands[0].owner
    if not isinstance(owner, AtenOp) or owner.name != "aten.arange.start_step":
        return None
    start, step = owner.value("start"), owner.value("step")
    return start if isinstance(start, int) and start >= 0 and step == 1 else None


def _reaches(value: SSAValue, end: Operation) -> bool:
    """Whether a value, or a view of it, is returned."""
    users = [use.operation for use in value.uses]
    return end in users or any(
        _reaches(user.results[0], end) for user in users if facts_of(user).may_share
    )


def _replace(op: AtenOp, value: SSAValue) -> None:
    """Put a value, in the shape that an op gives, in the op's place."""
    made = _add(op, "aten.view", value, shape_of(op.results[0]))
    if made not in op.operands:
        made.name_hint = op.results[0].name_hint
    Rewriter.replace_op(op, [], [made])


def _add(
    like: AtenOp, name: str, operand: SSAValue, shape: tuple[int, ...], **values: int
) -> SSAValue:
    """The result of a new op before `like`, with its annotations; a view that is none is not made."""
    if name == "aten.view" and shape_of(operand) == shape:
        return operand
    op = create(name, [operand], [tensor_type(shape, dtype_of_value(operand))], values)
    annotate(op, like)
    Rewriter.insert_op(op, InsertPoint.before(like))
    return op.results[0]
