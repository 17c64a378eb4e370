"""`dist.grouped_mm` and `dist.grouped_outer`: products of rows with the matrix of their group.

Only rows that belong to a group are computed. Each call reads where these begin and end; on a GPU
that waits for the device, as PyTorch's own fallbacks do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def grouped_mm(
    rows: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, *, groups: int, blocks: int = 1
) -> Tensor:
    """Each row times the matrix of its group; rows of no group give zeros.

    Shapes: rows M x K, weights E x K x N  ->  M x N. groups: on all devices together.
    """
    del groups
    out = rows.new_zeros((rows.shape[0], weights.shape[2]))
    for group, own in _groups(starts, ends, rows.shape[0], blocks):
        torch.mm(rows[own], weights[group], out=out[own])
    return out


def grouped_outer(
    rows: Tensor, grads: Tensor, starts: Tensor, ends: Tensor, *, groups: int, blocks: int = 1
) -> Tensor:
    """For each group the sum over its rows of the outer products of row and gradient.

    Shapes: rows M x K, grads M x N  ->  E x K x N. groups: on all devices together.
    """
    del groups
    out = rows.new_zeros((starts.shape[0], rows.shape[1], grads.shape[1]))
    for group, own in _groups(starts, ends, rows.shape[0], blocks):
        torch.mm(rows[own].t(), grads[own], out=out[group])
    return out


def _groups(
    starts: Tensor, ends: Tensor, num_rows: int, blocks: int
) -> Iterator[tuple[int, slice]]:
    """Each group that has rows here, and its rows; starts count from the first row of a block."""
    per_block, rows_per_block = starts.shape[0] // blocks, num_rows // blocks
    firsts, lasts = torch.stack([starts, ends]).clamp(0, rows_per_block).tolist()
    for group, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        offset = group // per_block * rows_per_block
        if last > first:
            yield group, slice(offset + first, offset + last)


_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.impl("grouped_mm", grouped_mm, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_outer", grouped_outer, "CompositeExplicitAutograd")
