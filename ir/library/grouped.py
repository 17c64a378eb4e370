# pyright: basic
# torch.library is only partly typed.
"""The schemas of grouped products: `dist.grouped_mm` and `dist.grouped_outer`, and of ragged rows.

Rows belong to groups, such as the tokens of an expert: those of group g are `starts[g]` up to, and
without, `ends[g]`. Each group has a matrix of its own. A row that belongs to no group gives zeros.

Ragged rows are spread over devices by their groups. Each device holds a run of groups and takes the
rows of these, however many there are: `bounds` (`dist.row_bounds`) says where the run of each
device begins and ends. In types each device has the number of rows of balanced groups, times
`load`. `index` is the number of this device among `shards`; without it the rows are those of all
devices. `dist.own_rows` takes a device's rows out of a replicated value, and `dist.all_rows` puts
them back at their indices, among zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_SPREAD = "int blocks=1, int parts=1, int shards=1"
_LIBRARY.define(
    "grouped_mm(Tensor rows, Tensor weights, Tensor starts, Tensor ends, Tensor? bounds=None, "
    f"Tensor? index=None, *, int groups, {_SPREAD}) -> Tensor"
)
_LIBRARY.define(
    "grouped_outer(Tensor rows, Tensor grads, Tensor starts, Tensor ends, Tensor? bounds=None, "
    f"Tensor? index=None, *, int groups, {_SPREAD}) -> Tensor"
)
_LIBRARY.define(
    "row_bounds(Tensor starts, Tensor ends, *, int rows, int blocks, int parts) -> Tensor"
)
_LIBRARY.define("row_routes(Tensor numbers, Tensor bounds, *, int tokens, int[] places) -> Tensor")
_LIBRARY.define(
    f"own_rows(Tensor rows, Tensor bounds, Tensor? index=None, *, float load=1.0, {_SPREAD})"
    " -> Tensor"
)
_LIBRARY.define(
    "all_rows(Tensor rows, Tensor bounds, Tensor? index=None, *, int num_rows, float load=1.0, "
    f"{_SPREAD}) -> Tensor"
)

GROUPED_MM = "dist.grouped_mm"
GROUPED_OUTER = "dist.grouped_outer"
ROW_BOUNDS = "dist.row_bounds"
OWN_ROWS = "dist.own_rows"
ROW_ROUTES = "dist.row_routes"
ALL_ROWS = "dist.all_rows"
OPS = (GROUPED_MM, GROUPED_OUTER, ROW_BOUNDS, ROW_ROUTES, OWN_ROWS, ALL_ROWS)
"""The ops' names in programs."""


def padded_rows(num_rows: int, devices: int, load: float = 1.0) -> int:
    """Size a type's ragged dim: for each device its equal share times `load`, at most
    `num_rows`."""
    return min(math.ceil(num_rows * load / devices), num_rows) * devices


def _check(starts: Tensor, ends: Tensor, groups: int) -> None:
    if starts.dim() != 1 or starts.shape != ends.shape:
        raise ValueError("starts and ends must be 1-d, with one index for each group")
    if {starts.dtype, ends.dtype} - {torch.int32, torch.int64}:
        raise ValueError("starts and ends must have dtype int32 or int64")
    if starts.shape[0] > groups:
        raise ValueError(f"starts has {starts.shape[0]} groups, more than groups={groups}")


def _devices(blocks: int = 1, parts: int = 1, shards: int = 1) -> tuple[int, int]:
    """The number of devices that rows are spread over, and the number of shards of an op's rows."""
    if min(blocks, parts, shards) < 1 or (blocks * parts) % shards:
        raise ValueError(f"{shards} shards do not divide {blocks} blocks of {parts} parts of rows")
    return blocks * parts, shards


def _meta_mm(
    rows: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, *_: Tensor | None, groups: int,
    **spread: int,
) -> Tensor:  # fmt: skip
    if rows.dim() != 2 or weights.dim() != 3 or weights.shape[0] != starts.shape[0]:
        raise ValueError("rows must be M x K, and weights G x K x N for the G groups of starts")
    if weights.shape[1] != rows.shape[1] or weights.dtype != rows.dtype:
        raise ValueError("weights must have the same K and dtype as rows")
    _devices(**spread)
    _check(starts, ends, groups)
    return rows.new_empty((rows.shape[0], weights.shape[2]))


def _meta_outer(
    rows: Tensor, grads: Tensor, starts: Tensor, ends: Tensor, *_: Tensor | None, groups: int,
    **spread: int,
) -> Tensor:  # fmt: skip
    if rows.dim() != 2 or grads.dim() != 2 or rows.shape[0] != grads.shape[0]:
        raise ValueError("rows must be M x K, and gradients M x N, with the same M")
    if rows.dtype != grads.dtype:
        raise ValueError("gradients must have the same dtype as rows")
    _devices(**spread)
    _check(starts, ends, groups)
    return rows.new_empty((starts.shape[0], rows.shape[1], grads.shape[1]))


def _meta_bounds(starts: Tensor, ends: Tensor, *, rows: int, blocks: int, parts: int) -> Tensor:
    _check(starts, ends, starts.shape[0] if starts.dim() else 0)
    if blocks < 1 or parts < 1 or starts.shape[0] % blocks:
        raise ValueError(f"{blocks} blocks do not divide {starts.shape[0]} groups")
    if rows < 0:
        raise ValueError(f"rows={rows} is negative; give the number of rows")
    return starts.new_empty((blocks * parts + 1,), dtype=torch.int64)


def _meta_routes(numbers: Tensor, bounds: Tensor, *, tokens: int, places: list[int]) -> Tensor:
    if len(places) != bounds.shape[0] - 1 or sorted(places) != list(range(len(places))):
        raise ValueError("places must be a permutation of the devices whose rows bounds delimits")
    if numbers.dim() != 1 or numbers.dtype != torch.int64:
        raise ValueError("numbers must be a vector of int64, the index of each row")
    if tokens % len(places):
        raise ValueError(f"{len(places)} devices do not divide {tokens} tokens")
    return numbers.new_empty((len(places), tokens), dtype=torch.bool)


def _meta_own(
    rows: Tensor, bounds: Tensor, *_: Tensor | None, load: float = 1.0, **spread: int
) -> Tensor:
    devices, shards = _devices(**spread)
    if bounds.shape != (devices + 1,):
        raise ValueError(f"bounds must have {devices + 1} elements, for {devices} devices")
    own = padded_rows(rows.shape[0], devices, load) // shards
    return rows.new_empty((own, *rows.shape[1:]))


def _meta_all(
    rows: Tensor, bounds: Tensor, *_: Tensor | None, num_rows: int, load: float = 1.0, **spread: int
) -> Tensor:
    devices, shards = _devices(**spread)
    if rows.shape[0] * shards != padded_rows(num_rows, devices, load):
        raise ValueError(f"rows must be a shard of {num_rows} rows over {devices} devices")
    return rows.new_empty((num_rows, *rows.shape[1:]))


_LIBRARY.impl("grouped_mm", _meta_mm, "Meta")
_LIBRARY.impl("grouped_outer", _meta_outer, "Meta")
_LIBRARY.impl("row_bounds", _meta_bounds, "Meta")
_LIBRARY.impl("row_routes", _meta_routes, "Meta")
_LIBRARY.impl("own_rows", _meta_own, "Meta")
_LIBRARY.impl("all_rows", _meta_all, "Meta")
