# pyright: basic
# torch.library is only partly typed.
"""The schemas of grouped products: of the ops `dist.grouped_mm` and `dist.grouped_outer`.

Rows belong to groups, such as the tokens of an expert: those of group g are `starts[g]` up to, and
without, `ends[g]`. Each group has a matrix of its own. A row that belongs to no group gives zeros:
devices which hold different groups add up their results.

A block is a run of groups: those of one device. With several blocks, rows come once for each block,
one block after another, and so do results; in those of a block, rows of other blocks are zero. What
is computed of results row by row then has its blocks on different devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.define(
    "grouped_mm(Tensor rows, Tensor weights, Tensor starts, Tensor ends, *, int groups, "
    "int blocks=1) -> Tensor"
)
_LIBRARY.define(
    "grouped_outer(Tensor rows, Tensor grads, Tensor starts, Tensor ends, *, int groups, "
    "int blocks=1) -> Tensor"
)

GROUPED_MM = "dist.grouped_mm"
GROUPED_OUTER = "dist.grouped_outer"
"""The ops' names in programs."""


def _check(rows: Tensor, starts: Tensor, ends: Tensor, groups: int, blocks: int) -> None:
    if starts.dim() != 1 or starts.shape != ends.shape:
        raise ValueError("starts and ends are one number for each group")
    if {starts.dtype, ends.dtype} - {torch.int32, torch.int64}:
        raise ValueError("starts and ends are int32 or int64")
    if blocks < 1 or starts.shape[0] % blocks or rows.shape[0] % blocks:
        raise ValueError(f"{blocks} blocks divide neither the groups nor the rows")
    if starts.shape[0] > groups:
        raise ValueError(f"there are {starts.shape[0]} groups, but groups = {groups}")


def _meta_mm(
    rows: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, *, groups: int, blocks: int = 1
) -> Tensor:
    if rows.dim() != 2 or weights.dim() != 3 or weights.shape[0] != starts.shape[0]:
        raise ValueError("rows are M x K, weights groups x K x N, one for each start")
    if weights.shape[1] != rows.shape[1] or weights.dtype != rows.dtype:
        raise ValueError("weights have the K and the dtype of the rows")
    _check(rows, starts, ends, groups, blocks)
    return rows.new_empty((rows.shape[0], weights.shape[2]))


def _meta_outer(
    rows: Tensor, grads: Tensor, starts: Tensor, ends: Tensor, *, groups: int, blocks: int = 1
) -> Tensor:
    if rows.dim() != 2 or grads.dim() != 2 or rows.shape[0] != grads.shape[0]:
        raise ValueError("rows are M x K, gradients M x N")
    if rows.dtype != grads.dtype:
        raise ValueError("gradients have the dtype of the rows")
    _check(rows, starts, ends, groups, blocks)
    return rows.new_empty((starts.shape[0], rows.shape[1], grads.shape[1]))


_LIBRARY.impl("grouped_mm", _meta_mm, "Meta")
_LIBRARY.impl("grouped_outer", _meta_outer, "Meta")
