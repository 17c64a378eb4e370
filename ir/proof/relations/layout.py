"""Layouts: the positions of a value's indices in a rank's local tensor, as digits.

A dim of an expression is an index, and what cuts it takes digits of that index. A digit is (dim,
stride, size): (index of the dim // stride) % size. The digits that no axis takes make up the dims
of the local tensor, each a list of digits, major to minor. Local views, permutations, gathers and
slices only move digits; where each stands is known exactly, whatever the shapes.
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
    """The layout in which every dim has the digits that its placements leave, padding included;
    None if they are none of an index."""
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
    """The same digits, neighbours that follow each other as one, those of size 1 left out."""
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
    """The digits above blocks of a length, and those within; None if a digit cannot be cut so."""
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
