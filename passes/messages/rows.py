"""Joining collectives of several tensors into one, of a matrix with a row for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    common_path,
    layer_of,
    set_layer,
    set_sharding_attrs,
    sharding_attrs_of,
)
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import num_elements, shape_of, tensor_type_of, with_shape


def join_scatters(members: Sequence[dist.ReduceScatterOp]) -> None:
    """Join reduce-scatters into one at the last's place; row i of its operand goes to rank i."""
    members = _with_elements(members)
    if len(members) <= 1:
        return
    last = members[-1]
    rows = [_scattered_rows(member, last) for member in members]
    widths = [shape_of(row)[1] for row in rows]
    height, total = shape_of(rows[0])[0], sum(widths)
    matrix = _add(last, last, "aten.cat", [rows], (height, total), dim=1)
    (row,) = _send(dist.ReduceScatterOp, members, matrix, (1, total), last).results
    start = 0
    for member, width in zip(members, widths, strict=True):
        part = _add(member, last, "aten.slice.Tensor", [row], (1, width), dim=1, start=start)
        _replace(member, _add(member, last, "aten.view", [part], shape_of(member.results[0])))
        start += width


def join_gathers(members: Sequence[dist.AllGatherOp]) -> None:
    """Join all-gathers into one at the first's place; slices of its result replace theirs."""
    members = _with_elements(members)
    if len(members) <= 1:
        return
    first = members[0]
    widths = [num_elements(member.operands[0]) for member in members]
    ranks = num_elements(first.results[0]) // widths[0]
    rows = [
        _add(member, first, "aten.view", member.operands, (1, width))
        for member, width in zip(members, widths, strict=True)
    ]
    total = sum(widths)
    row = _add(first, first, "aten.cat", [rows], (1, total), dim=1)
    (matrix,) = _send(dist.AllGatherOp, members, row, (ranks, total), first).results
    start = 0
    for member, width in zip(members, widths, strict=True):
        part = _add(
            member, first, "aten.slice.Tensor", [matrix], (ranks, width), dim=1, start=start
        )
        new = _gathered(member, first, part, ranks)
        start += width
        _rename(member, new)
    for member in members:
        Rewriter.erase_op(member)


_Message = TypeVar("_Message", bound=dist.DistOp)


def _with_elements(members: Sequence[_Message]) -> list[_Message]:
    """The collectives whose operands are not empty; empty ones need no part of a matrix."""
    return [member for member in members if num_elements(member.operands[0])]


def _send(
    kind: type[dist.DistOp],
    members: Sequence[dist.DistOp],
    matrix: SSAValue,
    shape: tuple[int, int],
    before: Operation,
) -> dist.DistOp:
    """Insert the joined collective of `matrix`; its layer is the common prefix of its members'."""
    last = members[-1]
    type_ = with_shape(tensor_type_of(matrix), shape)
    sent = dist.create_dist(kind, [matrix], [type_], axes=last.axes, dim=0, block=1)
    Builder.before(before, last).insert(sent, last.results[0])
    set_layer(sent, common_path(map(layer_of, members)))
    return sent


def _replace(member: dist.DistOp, new: SSAValue) -> None:
    _rename(member, new)
    Rewriter.erase_op(member)


def _rename(member: dist.DistOp, new: SSAValue) -> None:
    (old,) = member.results
    assert isinstance(new.owner, Operation)
    set_sharding_attrs(new.owner, sharding_attrs_of(member))
    new.name_hint = old.name_hint
    old.replace_all_uses_with(new)


def _scattered_rows(member: dist.ReduceScatterOp, before: Operation) -> SSAValue:
    """The operand of a reduce-scatter as a matrix whose row i goes to rank i."""
    (value,), shape = member.operands, shape_of(member.operands[0])
    dim, block = member.dim, member.block
    size = math.prod(shape) // num_elements(member.results[0])
    cut = (*shape[:dim], shape[dim] // (size * block), size, block, *shape[dim + 1 :])
    if math.prod(cut[: dim + 1]) > 1:
        value = _add(member, before, "aten.view", [value], cut)
        order = [dim + 1, *range(dim + 1), *range(dim + 2, len(cut))]
        turned = tuple(cut[index] for index in order)
        value = _add(member, before, "aten.permute", [value], turned, dims=order)
    return _add(member, before, "aten.view", [value], (size, math.prod(shape) // size))


def _gathered(member: dist.AllGatherOp, before: Operation, rows: SSAValue, ranks: int) -> SSAValue:
    """The result of an all-gather, given `rows`, whose row i came from rank i."""
    shape, dim, block = shape_of(member.operands[0]), member.dim, member.block
    cut = (ranks, *shape[:dim], shape[dim] // block, block, *shape[dim + 1 :])
    if math.prod(cut[1 : dim + 2]) > 1:
        rows = _add(member, before, "aten.view", [rows], cut)
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(cut))]
        turned = tuple(cut[index] for index in order)
        rows = _add(member, before, "aten.permute", [rows], turned, dims=order)
    return _add(member, before, "aten.view", [rows], shape_of(member.results[0]))


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
    return Builder.before(before, source).aten(name, operands, type_, "part", **arguments)
