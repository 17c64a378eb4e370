"""The effect of slices, views and permutations on the digits of a rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardweave.ir.mesh.placement import Placement
from shardweave.ir.proof.relations.held import Held
from shardweave.ir.proof.relations.layout import Digits, Layout, cut_at, joined, length


def cut(held: Held, axes: Sequence[tuple[str, int]], dim: int, block: int) -> Held | None:
    """The shard over axes (with their sizes) of a local dim, in blocks."""
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
    """The same elements, in their order, under another local shape."""
    layout = held.digits
    return None if layout is None else held.laid_out(viewed(layout, shape))


def turned(held: Held, order: Sequence[int]) -> Held | None:
    """Permute the local dims of a value."""
    layout = held.digits
    return None if layout is None else held.laid_out(tuple(layout[dim] for dim in order))


def without_dim(held: Held, dim: int) -> Held | None:
    """Without a local dim that has one index."""
    layout = held.digits
    if layout is None or layout[dim]:
        return None
    return held.laid_out((*layout[:dim], *layout[dim + 1 :]))


def viewed(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout under another shape of as many elements; None if a digit cannot be cut so."""
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
    """The digits of a local dim as (above, of that size, within blocks of that length)."""
    parts = cut_at(digits, block)
    if parts is None:
        return None
    upper = cut_at(parts[0], size)
    return None if upper is None else (upper[0], upper[1], parts[1])
