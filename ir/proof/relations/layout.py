"""Layouts: the positions of a value's indices in a rank's local tensor, as digits.

The index along a dim of an expression splits into digits: (dim, stride, size) stands for (index of
the dim // stride) % size. Each mesh axis that shards the dim takes a digit. The remaining digits
make up the dims of the local tensor, each a list of digits, major to minor. Local views,
permutations, gathers and slices only move digits, so that their positions are known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardweave.ir.mesh.placement import DimSharding, padded_size

Digit = tuple[int, int, int]
"""(dim of the expression, stride, size)"""

Digits = tuple[Digit, ...]
Layout = tuple[Digits, ...]
"""Digits of each dim of the local tensor, major to minor."""


def standard(shape: Sequence[int], dims: Sequence[DimSharding]) -> Layout | None:
    """Return the layout of a contiguous shard; None if placements do not divide the padded dim.
    Each dim has the digits that its placements leave, padding included."""
    layout: list[Digits] = []
    for dim, (size, placements) in enumerate(zip(shape, dims, strict=True)):
        digits: list[Digit] = []
        upper = padded_size(placements, size)
        for placement in placements:
            if upper % placement.span:
                return None
            digits.append((dim, placement.span, upper // placement.span))
            upper = placement.stride
        layout.append(joined([*digits, (dim, 1, upper)]))
    return tuple(layout)


def joined(digits: Sequence[Digit]) -> Digits:
    """Merge neighbouring digits that are contiguous, and drop digits of size 1."""
    merged: list[Digit] = []
    for dim, stride, size in digits:
        if size == 1:
            continue
        if merged and merged[-1][0] == dim and merged[-1][1] == stride * size:
            merged[-1] = (dim, stride, merged[-1][2] * size)
        else:
            merged.append((dim, stride, size))
    return tuple(merged)


def length(digits: Sequence[Digit]) -> int:
    return prod(size for _, _, size in digits)


def cut_at(digits: Sequence[Digit], block: int) -> tuple[Digits, Digits] | None:
    """Split the digits of an index i into digits of i // block and of i % block; None if a digit
    cannot be split there."""
    minor: list[Digit] = []
    major = list(digits)
    if block < 1:
        return None
    while block > 1:
        if not major:
            return None
        dim, stride, size = major.pop()
        if block >= size:
            if block % size:
                return None
            minor.insert(0, (dim, stride, size))
            block //= size
        elif size % block:
            return None
        else:
            minor.insert(0, (dim, stride, block))
            major.append((dim, stride * block, size // block))
            block = 1
    return tuple(major), tuple(minor)
