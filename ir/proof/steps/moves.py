"""Ops that only move elements: collectives, slices, views, concatenations, sub-batches."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.proof.ops import from_start
from shardweave.ir.proof.relations.digits import cut, seen_as, turned, without_dim
from shardweave.ir.proof.relations.held import (
    SUB_BATCH,
    Held,
    ProofAxes,
    RankNumber,
    Relation,
    Row,
    Value,
    concatenated,
    reduced_over,
)
from shardweave.ir.proof.relations.padding import index_of, padded, rank_position, without_padding
from shardweave.ir.proof.steps.ring import is_on_ring, on_ring

# Collectives


def collective(op: dist.DistOp, operands: Sequence[Value], axes: ProofAxes) -> list[Value | None]:
    """Relate a collective's, wait's or copy's results, one per operand; None if unrelated."""
    if isinstance(op, (dist.WaitOp, dist.HostCopyOp)):
        return list(operands)
    if is_on_ring(op):
        return on_ring(op, operands, axes)
    if isinstance(op, dist.ShardIndexOp):
        return [rank_position(op.axes, axes, {})]
    return [_sent(op, value, axes) for value in operands]


def _sent(op: dist.DistOp, value: Value, axes: ProofAxes) -> Value | None:
    if isinstance(value, Row):
        if op.effect is None or value.dim in op.effect.dims:
            return None
        sent = [(_sent(op, piece, axes), size) for piece, size in value.pieces]
        pieces = tuple([(piece, size) for piece, size in sent if piece is not None])
        return Row(value.dim, pieces) if len(pieces) == len(sent) else None
    if not isinstance(value, Relation):
        return None
    return value.with_held(_held_after(op, value.held, axes))


def _held_after(op: dist.DistOp, held: Held, axes: ProofAxes) -> Held | None:
    wide, effect = axes.wide(op.axes), op.effect
    if not wide or any(name.startswith(SUB_BATCH) for name in wide):
        return None if wide else held
    if effect is None:
        return None
    made: Held | None = held
    if effect.reduces is not None:
        made = reduced_over(made, wide) if held.sharding.reduction == effect.reduces else None
    if made is not None and effect.gathers is not None:
        made = concatenated(made, wide, *effect.gathers)
    if made is not None and effect.shards is not None:
        made = cut(made, [(name, axes.size(name)) for name in wide], *effect.shards)
    return made


# Local moves


def moved(op: AtenOp, operands: Sequence[Value], axes: ProofAxes) -> tuple[Value, ...] | None:
    """Relate an op that moves elements or computes a rank's position; None for others."""
    made: Value | None = None
    if op.name == "aten.cat":
        made = _joined(op, operands, axes)
    elif not operands or isinstance(operands[0], RankNumber):
        made = index_of(op, operands)
    elif isinstance(operands[0], Relation):
        made = _moved_part(op, operands[0], axes)
    elif isinstance(operands[0], Row) and op.name == "aten.slice.Tensor":
        made = operands[0].taken(op)
    return None if made is None else (made,)


def _moved_part(op: AtenOp, part: Relation, axes: ProofAxes) -> Relation | None:
    held = part.held
    if op.name == "aten.view":
        return part.with_held(seen_as(held, shape_of(op.results[0])))
    if op.name == "aten.permute":
        return part.with_held(turned(held, op.value("dims")))
    if op.name == "aten.constant_pad_nd":
        return part.with_held(padded(held, op.value("pad"), op.value("value")))
    is_part = op.name in ("aten.slice.Tensor", "aten.select.int")
    return _part_of(op, part, axes) if is_part else None


def _part_of(op: AtenOp, part: Relation, axes: ProofAxes) -> Relation | None:
    """Relate a slice or select of one of equal blocks, or of all but padding; None for others."""
    shape = shape_of(op.operands[0])
    dim = from_start(int(op.value("dim")), len(shape))
    if dim is None:
        return None
    whole = shape[dim]
    if op.name == "aten.select.int":
        index = from_start(int(op.value("index")), whole)
        taken = None if index is None else _sub_batch(part, dim, whole, 1, index, axes)
        return taken and taken.with_held(without_dim(taken.held, dim))
    size, start = shape_of(op.results[0])[dim], from_start(int(op.value("start") or 0), whole)
    if op.value("step") != 1 or not size or start is None or start + size > whole:
        return None
    if size == whole:
        return part
    trimmed = None if start else without_padding(part.held, dim, size)
    if trimmed is not None:
        return part.with_held(trimmed)
    if whole % size or start % size:
        return None
    return _sub_batch(part, dim, whole // size, size, start // size, axes)


def _sub_batch(
    part: Relation, dim: int, count: int, block: int, coordinate: int, axes: ProofAxes
) -> Relation | None:
    """Relate a block of a local dim as sub-batch `coordinate` of `count`; None if it is none."""
    name = axes.sub_batch(count, part.held.sharding)
    held = cut(part.held, [(name, count)], dim, block)
    at = tuple(sorted((*part.at, (name, frozenset({coordinate})))))
    return None if held is None else Relation(held, at)


def _joined(op: AtenOp, operands: Sequence[Value], axes: ProofAxes) -> Value | None:
    """Relate a concatenation: of all sub-batches in order, as the whole value; else as a Row."""
    shape = shape_of(op.results[0])
    if any(len(shape_of(value)) != len(shape) for value in op.operands):
        return None
    dim = from_start(int(op.value("dim")), len(shape))
    if dim is None:
        return None
    parts = [value for value in operands if isinstance(value, Relation)]
    if len(parts) == len(operands) and all(part.held == parts[0].held for part in parts):
        varying = [a for a, _ in parts[0].at if len({dict(part.at).get(a) for part in parts}) > 1]
        if len(varying) == 1 and varying[0].startswith(SUB_BATCH):
            (axis,) = varying
            places = [dict(part.at).get(axis) for part in parts]
            rest = {tuple([i for i in part.at if i[0] != axis]) for part in parts}
            wanted = [frozenset({index}) for index in range(axes.size(axis))]
            if places == wanted and len(rest) == 1:
                held = concatenated(parts[0].held, [axis], dim, None)
                return None if held is None else Relation(held, rest.pop())
    sizes = [shape_of(value)[dim] for value in op.operands]
    return Row(dim, tuple(zip(operands, sizes, strict=True)))
