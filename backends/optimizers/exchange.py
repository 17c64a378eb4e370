"""Messages that send shards of matrices to the ranks that own them, and shards of results back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardweave.backends.optimizers.shards import divided_dim, part_along
from shardweave.ir.capture.update.owners import senders_of

_ALIGNED = 16
"""Alignment of messages in a buffer, in bytes, so that a view of any dtype may begin there."""

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
    full = _narrowed(full, index)
    for dim, elements in _apart(index):
        full = full.index_select(dim, torch.tensor(elements, device=full.device))
    return full


def put(full: Tensor, index: Index, shard: Tensor) -> None:
    """Write a shard into `full` at `index`."""
    full, apart = _narrowed(full, index), _apart(index)
    if not apart:
        full.copy_(shard)
        return
    dim, elements = apart[0]
    if len(apart) == 1:
        full.index_copy_(dim, torch.tensor(elements, device=full.device), shard)
        return
    rest = tuple(range(n) if isinstance(x, range) else x for n, x in zip(full.shape, index))  # noqa: B905 - equal lengths
    rest = (*rest[:dim], *rest[dim + 1 :])
    for at, element in enumerate(elements):
        put(full.select(dim, element), rest, shard.select(dim, at))


def _narrowed(full: Tensor, index: Index) -> Tensor:
    for dim, elements in enumerate(index):
        if isinstance(elements, range):
            full = full.narrow(dim, elements.start, len(elements))
    return full


def _apart(index: Index) -> list[tuple[int, tuple[int, ...]]]:
    return [(dim, x) for dim, x in enumerate(index) if not isinstance(x, range)]


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

    @property
    def taken(self) -> int:
        """Bytes that the message takes in a buffer, with padding."""
        return -(-self.num_bytes // _ALIGNED) * _ALIGNED


def exchanged(messages: Sequence[Message], device: torch.device) -> list[Tensor | None]:
    """Send messages by one all-to-all; return the tensors that arrive here, None for the others.
    Collective: all ranks pass the same messages in the same order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived: list[Tensor | None] = [
        message.value if message.source == message.goal == rank else None for message in messages
    ]
    travelling = [i for i, m in enumerate(messages) if m.source != m.goal and m.num_bytes]
    if not travelling:
        return _with_empty(messages, arrived, rank, device)
    leaving: dict[int, list[int]] = {goal: [] for goal in range(size)}
    coming: dict[int, list[int]] = {source: [] for source in range(size)}
    for i in travelling:
        if messages[i].source == rank:
            leaving[messages[i].goal].append(i)
        if messages[i].goal == rank:
            coming[messages[i].source].append(i)
    sent = _packed((messages[i] for ids in leaving.values() for i in ids), device)
    sizes_in = [sum(messages[i].taken for i in ids) for ids in coming.values()]
    sizes_out = [sum(messages[i].taken for i in ids) for ids in leaving.values()]
    received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, sizes_in, sizes_out)
    at = 0
    for i in (i for ids in coming.values() for i in ids):
        message = messages[i]
        arrived[i] = received[at : at + message.num_bytes].view(message.dtype).view(message.shape)
        at += message.taken
    return _with_empty(messages, arrived, rank, device)


def _packed(messages: Iterable[Message], device: torch.device) -> Tensor:
    chosen = list(messages)
    buffer = torch.zeros(sum(m.taken for m in chosen), dtype=torch.uint8, device=device)
    at = 0
    for message in chosen:
        assert message.value is not None, "the sender has what it sends"
        place = buffer[at : at + message.num_bytes].view(message.dtype).view(message.shape)
        place.copy_(message.value)
        at += message.taken
    return buffer


def _with_empty(
    messages: Sequence[Message], arrived: list[Tensor | None], rank: int, device: torch.device
) -> list[Tensor | None]:
    for i, message in enumerate(messages):
        if message.goal == rank and not message.num_bytes:
            arrived[i] = torch.empty(message.shape, dtype=message.dtype, device=device)
    return arrived
