"""The effect of slices, views and permutations on the layout of a rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardweave.ir.mesh.placement import Placement
from shardweave.ir.proof.relations.held import Held
from shardweave.ir.proof.relations.layout import Digits, Layout, cut_at, joined, length


def cut(held: Held, axes: Sequence[tuple[str, int]], dim: int, block: int) -> Held | None:
    """Shard a local dim over axes (name, size), in blocks of `block`; None if impossible."""
    layout = held.digits
    if layout is None or not 0 <= dim < len(layout):
        return None
    if {axis for axis, _ in axes} & held.sharding.axes:
        return None
    size = 1
    for _, ranks in axes:
        size *= ranks
    parts = taken(layout[dim], size, block)
    if parts is None:
        return None
    above, own, within = parts
    sharding = held.sharding
    for axis, ranks in reversed(axes):
        lower = cut_at(own, ranks)
        if lower is None or len(digit := joined(lower[1])) != 1:
            return None
        own = lower[0]
        place, stride, _ = digit[0]
        sharding = sharding.with_dim(place, (*sharding.dims[place], Placement(axis, ranks, stride)))
    digits: Digits = joined([*above, *within])
    return held.laid_out((*layout[:dim], digits, *layout[dim + 1 :]), sharding)


def seen_as(held: Held, shape: Sequence[int]) -> Held | None:
    """Reshape the local tensor, with its elements in the same order; None if impossible."""
    layout = held.digits
    return None if layout is None else held.laid_out(viewed(layout, shape))


def turned(held: Held, order: Sequence[int]) -> Held | None:
    """Permute the local dims of a value."""
    layout = held.digits
    return None if layout is None else held.laid_out(tuple(layout[dim] for dim in order))


def without_dim(held: Held, dim: int) -> Held | None:
    """Remove a local dim of size 1; None if the dim is longer."""
    layout = held.digits
    if layout is None or layout[dim]:
        return None
    return held.laid_out((*layout[:dim], *layout[dim + 1 :]))


def viewed(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Reshape a layout; None if the sizes differ, or the new shape does not split its digits."""
    rest: Digits = tuple(digit for digits in layout for digit in digits)
    if length(rest) != prod(shape):
        return None
    dims: list[Digits] = []
    for size in reversed(shape):
        parts = cut_at(rest, size)
        if parts is None:
            return None
        rest, own = parts
        dims.insert(0, joined(own))
    return tuple(dims)


def taken(digits: Digits, size: int, block: int) -> tuple[Digits, Digits, Digits] | None:
    """Split a local dim's digits in three: above, of size `size`, and within blocks of `block`."""
    parts = cut_at(digits, block)
    if parts is None:
        return None
    upper = cut_at(parts[0], size)
    return None if upper is None else (upper[0], upper[1], parts[1])
