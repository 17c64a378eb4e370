"""Messages that send shards of matrices to the ranks that own them, and shards of results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardweave.backends.optimizers.shards import divided_dim, part_along
from shardweave.ir.capture.update.owners import senders_of

Index = tuple[range | tuple[int, ...], ...]
"""For each dim, the indices that a shard has; a range if they are consecutive."""


@dataclass(frozen=True)
class Layout:
    """The shards of a tensor. shards: by rank, its indices along each dim; ranks without a shard
    are missing."""

    shape: tuple[int, ...]
    shards: dict[int, Index]

    @property
    def is_replicated(self) -> bool:
        return len(set(self.shards.values())) == 1

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        return tuple(map(len, self.shards[rank]))

    def sources(self, goal: int) -> list[int]:
        """Choose one rank for each distinct shard, to send the shard to rank `goal`."""
        return senders_of(self.shards, goal)


def layout_of(tensor: DTensor) -> Layout:
    """Compute the indices of each rank's shard of a DTensor."""
    mesh = tensor.device_mesh
    ranks = tuple(mesh.mesh.flatten().tolist())
    return _layout(ranks, tuple(mesh.shape), tuple(tensor.placements), tuple(tensor.shape))


@cache
def _layout(
    ranks: tuple[int, ...],
    sizes: tuple[int, ...],
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> Layout:
    shards: dict[int, Index] = {}
    coordinates = torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist()
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        along = [torch.arange(length) for length in shape]
        for size, at, placement in zip(sizes, coordinate, placements, strict=True):
            dim = divided_dim(placement)
            if dim is not None:
                along[dim] = part_along(along[dim], 0, placement, size, at)
        shards[rank] = tuple(_elements(elements.tolist()) for elements in along)
    return Layout(shape, shards)


def _elements(positions: list[int]) -> range | tuple[int, ...]:
    first = positions[0] if positions else 0
    following = range(first, first + len(positions))
    return following if positions == list(following) else tuple(positions)


def take(full: Tensor, index: Index) -> Tensor:
    """Return the shard of `full` at `index`."""
    return full[_at(index, full.device)]


def put(full: Tensor, index: Index, shard: Tensor) -> None:
    """Write a shard into `full` at `index`."""
    full[_at(index, full.device)] = shard


def _at(index: Index, device: torch.device) -> tuple[Any, ...]:
    """Return an index in torch's form: slices of ranges, which make views; else tensors that
    broadcast to the shard's shape."""
    ranges = [elements for elements in index if isinstance(elements, range)]
    if len(ranges) == len(index):
        return tuple(slice(elements.start, elements.stop) for elements in ranges)
    return tuple(
        torch.tensor(elements, dtype=torch.int64, device=device).view(-1, *[1] * behind)
        for behind, elements in zip(reversed(range(len(index))), index, strict=True)
    )


@dataclass(frozen=True)
class Message:
    """A tensor sent from rank `source` to rank `goal`; `value` is None except on `source`."""

    source: int
    goal: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def exchanged(messages: Sequence[Message], device: torch.device) -> list[Tensor | None]:
    """Send messages by an all-to-all for each dtype; return the tensors that arrive here, None for
    the others. Collective: all ranks pass the same messages in the same order."""
    rank = dist.get_rank()
    arrived = [m.value if m.source == m.goal == rank else None for m in messages]
    travelling = [(i, m) for i, m in enumerate(messages) if m.source != m.goal]
    for dtype in dict.fromkeys(m.dtype for _, m in travelling):
        alike = [(i, m) for i, m in travelling if m.dtype == dtype]
        leaving = [m for _, m in alike if m.source == rank]
        coming = [(i, m) for i, m in alike if m.goal == rank]
        leaving.sort(key=lambda m: m.goal)
        coming.sort(key=lambda pair: pair[1].source)
        received = torch.empty(
            sum(m.num_bytes for _, m in coming), dtype=torch.uint8, device=device
        )
        if any(m.num_bytes for _, m in alike):
            values = [m.value.to(dtype).reshape(-1) for m in leaving if m.value is not None]
            sent = torch.cat([torch.empty(0, dtype=dtype, device=device), *values])
            dist.all_to_all_single(
                received,
                sent.view(torch.uint8),
                _sizes([m for _, m in coming], lambda m: m.source),
                _sizes(leaving, lambda m: m.goal),
            )
        parts = received.view(dtype).split([torch.Size(m.shape).numel() for _, m in coming])
        for (i, message), part in zip(coming, parts, strict=True):
            arrived[i] = part.view(message.shape)
    return arrived


def _sizes(messages: Sequence[Message], peer: Callable[[Message], int]) -> list[int]:
    """Return the bytes of messages by rank of their peer."""
    sizes = [0] * dist.get_world_size()
    for message in messages:
        sizes[peer(message)] += message.num_bytes
    return sizes
