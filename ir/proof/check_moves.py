"""What only moves values, checked against what is claimed: collectives, views, slices, joins.

A slice is right if what it gives, gathered again, is what it was taken of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.proof.check_rules import require
from shardweave.ir.proof.held import (
    SUB_BATCH,
    AttentionPart,
    Held,
    Local,
    ProofAxes,
    RankNumber,
    Relation,
    Row,
    Value,
    gathered,
    reduced,
)
from shardweave.ir.proof.layout import Layout, joined, length
from shardweave.ir.proof.ops import from_start
from shardweave.ir.proof.padding import padded, without_padding
from shardweave.ir.proof.positions import index_of

WRONG = "is not what moving its operand gives"


def _is_moved(before: Held | None, after: Held | None) -> bool:
    """Whether a value is another one at most some of whose padding is no longer known."""
    if before is None or after is None:
        return False
    fill = after.fill
    known = fill is None or (
        before.fill is not None
        and fill.value == before.fill.value
        and fill.dims <= before.fill.dims
    )
    return known and replace(before, fill=None) == replace(after, fill=None)


# Collectives


def check_collective(op: dist.DistOp, value: Value, claim: Value, axes: ProofAxes) -> None:
    """Check that a collective makes what is claimed of a value. Raises Unfounded."""
    if isinstance(value, Row) and isinstance(claim, Row):
        across = {getattr(op, "dim", None), getattr(op, "from_dim", None)}
        alike = [size for _, size in value.pieces] == [size for _, size in claim.pieces]
        require(value.dim == claim.dim and value.dim not in across and alike, WRONG)
        for (piece, _), (sent, _) in zip(value.pieces, claim.pieces, strict=True):
            check_collective(op, piece, sent, axes)
    elif isinstance(value, AttentionPart) and isinstance(claim, AttentionPart):
        require(replace(claim, whole=value.whole) == value, WRONG)
        check_collective(op, value.whole, claim.whole, axes)
    else:
        require(isinstance(value, Relation) and isinstance(claim, Relation), WRONG)
        assert isinstance(value, Relation)
        assert isinstance(claim, Relation)
        require(claim.at == value.at, WRONG)
        require(_is_sent(op, value.held, claim.held, axes), WRONG)


def _is_sent(op: dist.DistOp, before: Held, after: Held, axes: ProofAxes) -> bool:
    wide = axes.wide(op.axes)
    if not wide:
        return before == after and not set(wide) & before.sharding.axes
    if any(name.startswith(SUB_BATCH) for name in wide):
        return False
    if isinstance(op, dist.AllReduceOp):
        return before.sharding.reduction == op.reduction and reduced(before, wide) == after
    if not isinstance(op, dist.AlongDimOp):
        return False
    if isinstance(op, dist.AllGatherOp):
        return gathered(before, wide, op.dim, op.block) == after
    whole: Held | None = None
    if isinstance(op, dist.ReduceScatterOp):
        whole = reduced(before, wide) if before.sharding.reduction == "sum" else None
    elif isinstance(op, dist.AllToAllOp):
        whole = gathered(before, wide, op.from_dim, op.from_block)
    elif isinstance(op, dist.SliceOp):
        whole = before
    return _is_slice(whole, after, wide, op.dim, op.block, axes)


def _is_slice(
    whole: Held | None,
    part: Held,
    names: Sequence[str],
    dim: int,
    block: int,
    axes: ProofAxes,
) -> bool:
    """Whether a part, gathered over axes, is a whole value that these do not cut."""
    seats = [part.sharding.seat_of(name) for name in names]
    sizes = [seat[1].size if seat else 0 for seat in seats]
    is_sized = sizes == [axes.size(name) for name in names]
    return is_sized and _is_moved(whole, gathered(part, names, dim, block))


# Ops of one rank


def check_move(op: AtenOp, operands: Sequence[Value], claim: Value, axes: ProofAxes) -> None:
    """Check that an op that computes nothing gives what is claimed. Raises Unfounded."""
    if isinstance(claim, RankNumber):
        require(index_of(op, operands) == claim, "is another position")
    elif op.name == "aten.cat":
        require(_is_joined(op, operands, claim, axes), WRONG)
    elif isinstance(operands[0], Row):
        require(op.name == "aten.slice.Tensor" and operands[0].taken(op) == claim, WRONG)
    else:
        (value, *_) = operands
        require(isinstance(value, Relation) and isinstance(claim, Relation), WRONG)
        assert isinstance(value, Relation)
        assert isinstance(claim, Relation)
        require(_is_part(op, value, claim, axes), WRONG)


def _is_part(op: AtenOp, value: Relation, claim: Relation, axes: ProofAxes) -> bool:
    before, after = value.held, claim.held
    if op.name in ("aten.slice.Tensor", "aten.select.int"):
        return _is_slice_of(op, value, claim, axes)
    if claim.at != value.at:
        return False
    if op.name == "aten.constant_pad_nd":
        return padded(before, op.value("pad"), op.value("value")) == after
    if before.digits is None or after.digits is None:
        return False
    if op.name == "aten.view":
        alike = _in_a_row(before.digits) == _in_a_row(after.digits)
    elif op.name == "aten.permute":
        order: list[int] = op.value("dims")
        turned = [joined(before.digits[dim]) for dim in order]
        alike = turned == [joined(own) for own in after.digits]
    else:
        return False
    is_shaped = tuple(map(length, after.digits)) == shape_of(op.results[0])
    return alike and is_shaped and _is_moved(before, replace(after, layout=before.layout))


def _in_a_row(layout: Layout) -> object:
    return joined([digit for own in layout for digit in own])


def _is_slice_of(op: AtenOp, value: Relation, claim: Relation, axes: ProofAxes) -> bool:
    """Whether a slice takes a sub-batch of a value, cuts off padding, or nothing."""
    shape = shape_of(op.operands[0])
    dim = from_start(int(op.value("dim")), len(shape))
    is_one = op.name == "aten.select.int"
    given = int(op.value("index" if is_one else "start") or 0)
    start = None if dim is None else from_start(given, shape[dim])
    if dim is None or start is None or (not is_one and op.value("step") != 1):
        return False
    size = 1 if is_one else shape_of(op.results[0])[dim]
    if size == shape[dim] and not is_one:
        return claim == value
    if start + size > shape[dim] or not size:
        return False
    new = [item for item in claim.at if item not in value.at]
    if not new:
        return claim == value.with_held(without_padding(value.held, dim, size)) and not start
    ((axis, coordinates),) = new if len(new) == 1 else [("", frozenset[int]())]
    part = _with_dim(claim.held, dim) if is_one else claim.held
    return (
        shape[dim] % size == start % size == 0
        and axis not in value.held.sharding.axes
        and claim.at == tuple(sorted((*value.at, (axis, frozenset({start // size})))))
        and coordinates == frozenset({start // size})
        and axis in axes.sub_batches
        and axes.size(axis) * size == shape[dim]
        and part is not None
        and _is_slice(value.held, part, [axis], dim, size, axes)
    )


def _with_dim(held: Held, dim: int) -> Held | None:
    """With a local dim that has one index."""
    layout = held.digits
    return None if layout is None else held.laid_out((*layout[:dim], (), *layout[dim:]))


def _is_joined(op: AtenOp, operands: Sequence[Value], claim: Value, axes: ProofAxes) -> bool:
    """Whether all sub-batches of a value are joined, or values stand side by side."""
    shape = shape_of(op.results[0])
    dim = from_start(int(op.value("dim")), len(shape))
    if dim is None or any(len(shape_of(value)) != len(shape) for value in op.operands):
        return False
    if isinstance(claim, Row):
        sizes = [shape_of(value)[dim] for value in op.operands]
        values = [None if isinstance(value, Local) else value for value in operands]
        return claim.dim == dim and list(claim.pieces) == list(zip(values, sizes, strict=True))
    parts = [value for value in operands if isinstance(value, Relation)]
    if not isinstance(claim, Relation) or len(parts) != len(operands):
        return False
    gone = [axis for axis, _ in parts[0].at if axis not in dict(claim.at)]
    if len(gone) != 1 or len(parts) != axes.size(gone[0]):
        return False
    for index, part in enumerate(parts):
        own = tuple(sorted((*claim.at, (gone[0], frozenset({index})))))
        if part.held != parts[0].held or part.at != own:
            return False
    return gathered(parts[0].held, gone, dim, None) == claim.held
