"""Gradients in messages that start while the backward pass goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir import dist
from shardweave.ir.annotations import (
    annotate,
    copy_of,
    layer_of,
    phase_of,
    set_layer,
    set_sharding_attrs,
    sharding_attrs_of,
)
from shardweave.ir.aten import AtenOp, create
from shardweave.ir.facts import facts_of
from shardweave.ir.program import Program
from shardweave.ir.rewrite.buckets import Buckets, join
from shardweave.ir.syntax import Operands
from shardweave.ir.types import dtype_of_value, shape_of, tensor_type_of, with_shape


def bucket_gradients(program: Program, bucket_bytes: int) -> int:
    """Join the reductions of gradients into messages of at most `bucket_bytes`. Linear.

    Returns how many reductions there are. Raises ValueError for a bucket of no bytes.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bytes={bucket_bytes}; use a bucket of at least 1 byte.")
    reductions = _gradient_reductions(program)
    buckets = Buckets(bucket_bytes)
    for op in _place_by_production(program, reductions):
        reduction = op.reduction if isinstance(op, dist.AllReduceOp) else "sum"
        key = (type(op), op.axes, reduction, copy_of(op), phase_of(op))
        buckets.add((*key, dtype_of_value(op.operands[0])), op)
    for members in buckets.close():
        if isinstance(members[0], dist.ReduceScatterOp):
            _join_rows(members)
        else:
            join(members)
    return len(reductions)


def _gradient_reductions(program: Program) -> list[dist.DistOp]:
    """Blocking reductions whose results are gradients and nothing else."""
    last = program.return_op
    others = {slot.value for slot in program.results if slot.kind != "grad"}

    def is_gradient(value: SSAValue) -> bool:
        users = [use.operation for use in value.uses]
        if len(users) == 1 and isinstance(users[0], AtenOp) and facts_of(users[0]).view == "cast":
            (value,) = users[0].results  # after a sum in another dtype (`reduce-in`)
            users = [use.operation for use in value.uses]
        return bool(users) and value not in others and all(user is last for user in users)

    return [
        op
        for op in program.ops
        if (type(op) is dist.AllReduceOp or type(op) is dist.ReduceScatterOp)
        and all(map(is_gradient, op.results))
    ]


def _place_by_production(
    program: Program, reductions: Sequence[dist.DistOp]
) -> Iterator[dist.DistOp]:
    """Put each gradient's reduction, on its own, right behind the op that makes the gradient."""
    by_producer: dict[Operation | Block, list[dist.DistOp]] = {}
    for op in reductions:
        for single in _singles(op):
            by_producer.setdefault(single.operands[0].owner, []).append(single)
    block = program.function.body.block
    if block in by_producer:
        Rewriter.insert_op(by_producer[block], InsertPoint.at_start(block))
        yield from by_producer[block]
    for producer in [op for op in program.ops if op in by_producer]:
        Rewriter.insert_op(by_producer[producer], InsertPoint.after(producer))
        yield from by_producer[producer]


def _singles(op: dist.DistOp) -> list[dist.DistOp]:
    """A collective as detached ones of one operand each, which have taken its place."""
    op.detach()
    if len(op.operands) == 1:
        return [op]
    shardings = sharding_attrs_of(op)
    found: list[dist.DistOp] = []
    for index, (operand, result) in enumerate(zip(op.operands, op.results, strict=True)):
        single = type(op).create(
            operands=[operand],
            result_types=[result.type],
            properties=op.properties,
            location=op.location,
        )
        set_sharding_attrs(single, None if shardings is None else [shardings[index]])
        if isinstance(operand.owner, Operation) and layer_of(operand.owner):
            set_layer(single, layer_of(operand.owner))
        single.results[0].name_hint = result.name_hint
        result.replace_all_uses_with(single.results[0])
        found.append(single)
    op.erase()
    return found


def _join_rows(members: Sequence[dist.DistOp]) -> None:
    """Send reduce-scatters as one, where the last stands: what each rank is to get is a row."""
    if len(members) == 1:
        return
    last = members[-1]
    rows = [_rows(member, last) for member in members]
    widths = [shape_of(row)[1] for row in rows]
    height, total = shape_of(rows[0])[0], sum(widths)
    matrix = _add(last, last, "aten.cat", [rows], (height, total), dim=1)
    type_ = with_shape(tensor_type_of(matrix), (1, total))
    sent = dist.create(dist.ReduceScatterOp, [matrix], [type_], axes=last.axes, dim=0, block=1)
    annotate(sent, last)
    set_layer(sent, "")
    sent.results[0].name_hint = last.results[0].name_hint
    Rewriter.insert_op(sent, InsertPoint.before(last))
    start = 0
    for member, width in zip(members, widths, strict=True):
        (old,) = member.results
        part = _add(member, last, "aten.slice.Tensor", sent.results, (1, width), dim=1, start=start)
        new = _add(member, last, "aten.view", [part], shape_of(old))
        assert isinstance(new.owner, Operation)
        set_sharding_attrs(new.owner, sharding_attrs_of(member))
        new.name_hint = old.name_hint
        old.replace_all_uses_with(new)
        start += width
    for member in members:
        Rewriter.erase_op(member)


def _rows(member: dist.DistOp, before: Operation) -> SSAValue:
    """The operand of a reduce-scatter as a matrix, of which row i goes to rank i."""
    assert isinstance(member, dist.ReduceScatterOp)
    (value,), shape = member.operands, shape_of(member.operands[0])
    dim, block = member.dim, member.block
    size = math.prod(shape) // math.prod(shape_of(member.results[0]))
    cut = (*shape[:dim], shape[dim] // (size * block), size, block, *shape[dim + 1 :])
    if math.prod(cut[: dim + 1]) > 1:
        value = _add(member, before, "aten.view", [value], cut)
        order = [dim + 1, *range(dim + 1), *range(dim + 2, len(cut))]
        turned = tuple(cut[index] for index in order)
        value = _add(member, before, "aten.permute", [value], turned, dims=order)
    return _add(member, before, "aten.view", [value], (size, math.prod(shape) // size))


def _add(
    source: Operation,
    before: Operation,
    name: str,
    operands: Operands,
    shape: Sequence[int],
    **arguments: int | list[int],
) -> SSAValue:
    """Add an op of the layer, phase and dtype of `source`; returns its result."""
    type_ = with_shape(tensor_type_of(source.operands[0]), shape)
    op = create(name, operands, [type_], arguments)
    annotate(op, source)
    op.results[0].name_hint = "part"
    Rewriter.insert_op(op, InsertPoint.before(before))
    return op.results[0]
