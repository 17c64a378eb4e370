"""Grouped matrix products of rows sorted by group (expert), and each device's share of the rows.

Rows outside all groups are not computed. Each call reads the groups' bounds on the host; on a GPU
this waits for the device, as PyTorch's own fallbacks do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def grouped_mm(
    rows: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, bounds: Tensor | None = None,
    index: Tensor | None = None, *, groups: int, blocks: int = 1, parts: int = 1, shards: int = 1,
) -> Tensor:  # fmt: skip
    """Multiply each row by the matrix of its group; rows of no group give zeros.

    Shapes: rows M x K, weights E x K x N  ->  M x N. groups: number of groups over all devices.
    """
    del groups, blocks, parts
    out = rows.new_zeros((rows.shape[0], weights.shape[2]))
    for group, own in _groups(starts, ends, rows.shape[0], _first(bounds, index, shards)):
        torch.mm(rows[own], weights[group], out=out[own])
    return out


def grouped_outer(
    rows: Tensor, grads: Tensor, starts: Tensor, ends: Tensor, bounds: Tensor | None = None,
    index: Tensor | None = None, *, groups: int, blocks: int = 1, parts: int = 1, shards: int = 1,
) -> Tensor:  # fmt: skip
    """Sum, for each group, the outer products of its rows and their gradients.

    Shapes: rows M x K, grads M x N  ->  E x K x N. groups: number of groups over all devices.
    """
    del groups, blocks, parts
    out = rows.new_zeros((starts.shape[0], rows.shape[1], grads.shape[1]))
    for group, own in _groups(starts, ends, rows.shape[0], _first(bounds, index, shards)):
        torch.mm(rows[own].t(), grads[own], out=out[group])
    return out


def _first(bounds: Tensor | None, index: Tensor | None, shards: int) -> Tensor | int:
    """Return the index of a device's first row among the rows of all devices."""
    if bounds is None or index is None:
        return 0
    return bounds[index * ((bounds.shape[0] - 1) // shards)]


def _groups(
    starts: Tensor, ends: Tensor, num_rows: int, first: Tensor | int
) -> Iterator[tuple[int, slice]]:
    runs = (torch.stack([starts, ends]) - first).clamp(0, num_rows)
    for group, (start, end) in enumerate(runs.t().tolist()):
        if end > start:
            yield group, slice(start, end)


def row_bounds(starts: Tensor, ends: Tensor, *, rows: int, blocks: int, parts: int) -> Tensor:
    """Return the index of each device's first row, and at the end the number of all rows. blocks:
    number of blocks of groups. The rows of each block are split into `parts` of equal length. Rows
    of no group come after all groups and belong to the last device. Raises ValueError unless each
    group begins at the row where the group before it ends, the first at row 0."""
    follow = (starts[1:] == ends[:-1]).all() & (starts <= ends).all()
    if not follow & (starts[0] == 0) & (ends[-1] <= rows):
        raise ValueError(
            f"dist.row_bounds: groups start at {starts.tolist()} and end at {ends.tolist()}; give "
            f"groups that follow each other without gaps, from row 0 to at most row {rows}."
        )
    firsts = starts.view(blocks, -1)[:, 0].long()
    lasts = ends.view(blocks, -1)[:, -1].long()
    part = torch.arange(parts, device=starts.device)
    each = firsts[:, None] + (lasts - firsts)[:, None] * part // parts
    return torch.cat([each.flatten(), each.new_full((1,), rows)])


def row_routes(numbers: Tensor, bounds: Tensor, *, tokens: int, places: list[int]) -> Tensor:
    """Return a bool tensor, devices x tokens: True if the device needs the token. numbers: the
    token of each row, rows sorted by group. places: each device's index in `bounds`."""
    routes = torch.zeros((len(places), tokens), dtype=torch.bool, device=numbers.device)
    device_of = torch.empty(len(places), dtype=torch.int64, device=numbers.device)
    device_of[torch.tensor(places, device=numbers.device)] = torch.arange(
        len(places), device=numbers.device
    )
    row = torch.arange(numbers.shape[0], device=numbers.device)
    number = torch.searchsorted(bounds[1:-1].contiguous(), row, right=True)
    routes[device_of[number], numbers] = True
    return routes


def own_rows(
    rows: Tensor, bounds: Tensor, index: Tensor | None = None, *, load: float = 1.0,
    blocks: int = 1, parts: int = 1, shards: int = 1,
) -> Tensor:  # fmt: skip
    """Return this device's rows of a value; all rows if `index` is None."""
    del load, blocks, parts
    if index is None:
        return rows.clone()
    start, end = own_range(bounds, index, shards)
    return rows[start:end].clone()


def all_rows(
    rows: Tensor, bounds: Tensor, index: Tensor | None = None, *, num_rows: int, load: float = 1.0,
    blocks: int = 1, parts: int = 1, shards: int = 1,
) -> Tensor:  # fmt: skip
    """Return `num_rows` rows: this device's rows at their positions, zeros elsewhere."""
    del load, blocks, parts
    if index is None:
        return rows.clone()
    start, end = own_range(bounds, index, shards)
    out = rows.new_zeros((num_rows, *rows.shape[1:]))
    out[start:end] = rows
    return out


def own_range(bounds: Tensor, index: Tensor, shards: int) -> tuple[int, int]:
    """Return the range (start, end) of a device's rows among the rows of all devices."""
    step = (bounds.shape[0] - 1) // shards
    at = int(index) * step
    start, end = bounds[at : at + step + 1 : step].tolist()
    return start, end


_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
for _function in (grouped_mm, grouped_outer, row_bounds, row_routes, own_rows, all_rows):
    _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
