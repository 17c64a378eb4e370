"""Blocks and sums that travel along a ring of ranks (`dist.shift`, `ring_slice`, `ring_join`).

A ring over a mesh axis adds two axes to the proof, on which a coordinate k stands for the rank that
is k positions further than this one: one for blocks, one for the terms of sums. A shard over the
mesh axis is the block at coordinate 0, and its unreduced term the term at 0; a shift adds 1 to all
coordinates. Each rank meets the blocks in an order of its own, but each block once, so that sums
over all coordinates are complete. A coordinate is not a rank's position, so no index may be
computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from xdsl.ir import Operation

from shardweave.ir.dialects import dist
from shardweave.ir.mesh.placement import ordered
from shardweave.ir.proof.relations.digits import cut
from shardweave.ir.proof.relations.held import (
    RING,
    Held,
    ProofAxes,
    Relation,
    Value,
    concatenated,
    has_terms,
)


def is_on_ring(op: Operation) -> TypeGuard[dist.OverAxesOp]:
    return isinstance(op, (dist.ShiftOp, dist.RingSliceOp, dist.RingJoinOp))


def _block(axis: str) -> str:
    return f"{RING}block.{axis}"


def _term(axis: str) -> str:
    return f"{RING}term.{axis}"


def add_ring(op: dist.OverAxesOp, axes: ProofAxes) -> None:
    """Add the axes of a ring op, if it acts over one wide mesh axis."""
    if len(axes.wide(op.axes)) == 1:
        (axis,) = axes.wide(op.axes)
        axes.rings.setdefault(axis)
        axes.sub_batches.update(dict.fromkeys((_block(axis), _term(axis)), axes.size(axis)))


def on_ring(op: dist.OverAxesOp, operands: Sequence[Value], axes: ProofAxes) -> list[Value | None]:
    """Relate the result of a ring op; None if it is unrelated."""
    wide = axes.wide(op.axes)
    parts = [value for value in operands if isinstance(value, Relation)]
    if len(wide) != 1 or wide[0] not in axes.rings or len(parts) < len(operands):
        return [None if wide else operands[0]]
    (axis,) = wide
    if isinstance(op, dist.ShiftOp):
        return [_shifted(parts[0], axis, axes)]
    if isinstance(op, dist.RingSliceOp):
        held = cut(parts[0].held, [(_block(axis), axes.size(axis))], op.dim, op.block)
        return [None if held is None else _at(Relation(held, parts[0].at), _block(axis), op.turn)]
    assert isinstance(op, dist.RingJoinOp)
    return [_joined(op, parts, axis, axes)]


def _at(value: Relation, name: str, coordinate: int) -> Relation:
    return replace(value, at=tuple(sorted((*value.at, (name, frozenset({coordinate}))))))


def _renamed(held: Held, old: str, new: str, axes: ProofAxes) -> Held:
    sharding = held.sharding
    dims = tuple(
        ordered(replace(p, axis=new) if p.axis == old else p for p in dim) for dim in sharding.dims
    )
    pending = [new if axis == old else axis for axis in sharding.unreduced]
    unreduced = tuple(axis for axis in axes.names if axis in pending)
    return replace(held, sharding=replace(sharding, dims=dims, unreduced=unreduced))


def as_block(value: Value, axis: str, axes: ProofAxes) -> Relation | None:
    """Relate a shard over a ring's mesh axis as the block at coordinate 0; None for others."""
    if not isinstance(value, Relation):
        return None
    sharding = value.held.sharding
    if axis not in sharding.placed_axes or _block(axis) in sharding.axes:
        return None
    held = _renamed(value.held, axis, _block(axis), axes)
    return _at(Relation(held, value.at), _block(axis), 0)


def _own_term(value: Relation, axis: str, axes: ProofAxes) -> Relation:
    """Relate a value that is unreduced over a mesh axis as the term at coordinate 0."""
    if axis not in value.held.sharding.unreduced:
        return value
    return _at(Relation(_renamed(value.held, axis, _term(axis), axes), value.at), _term(axis), 0)


def _exchanged(value: Relation, axis: str, axes: ProofAxes) -> Relation:
    """Swap the mesh axis and the axis of blocks in a product of the block at coordinate 0 and a
    shard, as either operand can be read as the block. Other values are returned unchanged."""
    is_own = (_block(axis), frozenset({0})) in value.at
    if not is_own or not {axis, _block(axis)} <= set(value.held.sharding.placed_axes):
        return value
    held = value.held
    for old, new in ((axis, ""), (_block(axis), axis), ("", _block(axis))):
        held = _renamed(held, old, new, axes)
    return Relation(held, value.at)


def settled(value: Relation, axes: ProofAxes) -> Relation:
    """Relate a block at coordinate 0 as a shard over the mesh axis, unless it uses this axis."""
    for axis in axes.rings:
        item = _block(axis), frozenset({0})
        if item in value.at and axis not in value.held.sharding.axes:
            held = _renamed(value.held, _block(axis), axis, axes)
            value = Relation(held, tuple([other for other in value.at if other != item]))
    return value


def terms_of_one_sum(
    first: Relation, second: Relation, axes: ProofAxes
) -> tuple[Relation, Relation]:
    """Relate both operands as terms of a ring if one of them already is a term of the ring."""
    for axis in axes.rings:
        if _term(axis) in first.held.sharding.unreduced + second.held.sharding.unreduced:
            first, second = (
                settled(_own_term(value, axis, axes), axes) for value in (first, second)
            )
    return first, second


def _shifted(value: Relation, axis: str, axes: ProofAxes) -> Relation | None:
    """Relate the next rank's value: add 1 to all coordinates of the ring; None if impossible."""
    names = _block(axis), _term(axis)
    sharding, size = value.held.sharding, axes.size(axis)
    if axis in sharding.unreduced:
        if names[1] in sharding.unreduced or not value.held.terms:
            return None
        value = _own_term(value, axis, axes)
    value = as_block(value, axis, axes) or value
    if axis in value.held.sharding.axes:
        return None
    at = [
        (name, frozenset((k + 1) % size for k in which) if name in names else which)
        for name, which in value.at
    ]
    return settled(Relation(value.held, tuple(at)), axes)


def _joined(
    op: dist.RingJoinOp, parts: Sequence[Relation], axis: str, axes: ProofAxes
) -> Relation | None:
    """Relate a concatenation of the blocks at coordinates 0, 1, .., in the order of ranks."""
    name = _block(axis)
    parts = [
        part if name in dict(part.at) else as_block(part, axis, axes) or part for part in parts
    ]
    if parts[0].held != parts[-1].held:
        parts[0] = _exchanged(parts[0], axis, axes)
    places = [dict(part.at).get(name) for part in parts]
    rest = {tuple([item for item in part.at if item[0] != name]) for part in parts}
    is_one = len({part.held for part in parts}) == 1 and len(rest) == 1
    if not is_one or places != [frozenset({k}) for k in range(axes.size(axis))]:
        return None
    held = concatenated(parts[0].held, [name], op.dim, op.block)
    if held is None:
        return None
    held = held if has_terms(held.sharding) else replace(held, terms=0)
    return Relation(held, rest.pop())
