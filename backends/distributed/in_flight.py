"""Asynchronous collectives: started by one call, and waited for by another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.ir.dialects.dist_ring import borders, narrowed, widened
from shardweave.ir.mesh.shards import merge_blocks


def as_ordered_integers(x: Tensor) -> Tensor:
    """Map floating-point numbers to integers that compare in the same order; NaN is the largest. A
    negative number's bits are inverted except for the sign, since they hold its magnitude."""
    wide = x if x.dtype == torch.float64 else x.float()  # backends reduce no 16-bit integers
    dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    numbers = _turned(wide.contiguous().view(dtype))
    return numbers.masked_fill_(wide.isnan(), torch.iinfo(dtype).max)


def from_ordered_integers(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `as_ordered_integers`; returns numbers of `dtype`."""
    wide = torch.float64 if numbers.dtype == torch.int64 else torch.float32
    return _turned(numbers).view(wide).to(dtype)


def _turned(bits: Tensor) -> Tensor:
    """Invert all bits but the sign of negative numbers; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


@dataclass(frozen=True)
class Group:
    """The ranks over which a collective communicates, including this rank.

    ranks: global ranks by position along the axes, the first axis slowest. order: by position, the
    rank within `process_group`, which torch sorts by global rank.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def own(self) -> int:
        """This rank within `process_group`."""
        return dist.get_rank(self.process_group)

    @cached_property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(self.size))

    def by_position(self, by_group_rank: Tensor) -> list[Tensor]:
        """Reorder dim 0, which is by rank within the process group, by position along the axes."""
        return [by_group_rank[rank] for rank in self.order]

    def block_cyclic(self, x: Tensor, dim: int, block: int) -> Tensor:
        """Split `dim` block-cyclically into one shard for each rank, by rank in the process group.
        Returns the shards (`take_blocks` of each index), stacked along a new contiguous dim 0."""
        shape = list(x.shape)
        rounds = shape[dim] // (self.size * block)
        cut = x.reshape(*shape[:dim], rounds, self.size, block, *shape[dim + 1 :])
        parts = cut.movedim(dim + 1, 0).reshape(
            self.size, *shape[:dim], rounds * block, *shape[dim + 1 :]
        )
        if not self.is_sorted:
            parts = parts[[self.order.index(rank) for rank in range(self.size)]]
        return parts.contiguous()


# torch 2.13 deprecates the older names, which are all that 2.11 has.
gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(slots=True)
class InFlight:
    """The future result of a collective that has been started.

    work: torch's handle; None if there is nothing to wait for. arrive: a function that returns the
    tensor once the work is done. The collective's buffers live as long as this object.
    """

    work: Any
    arrive: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Wait for the tensor and return it. The current stream waits on a GPU, else the thread."""
        if self.work is not None:
            self.work.wait()
        return self.arrive()


def here(x: Tensor) -> InFlight:
    """Wrap a tensor that is available already."""
    return InFlight(None, lambda: x)


def start_copy(x: Tensor, target: torch.device, into: Tensor | None = None) -> InFlight:
    """Start a contiguous copy of a tensor between a GPU and pinned host memory, on a stream of its
    own. If neither device is a GPU, the copy is made at once. Torch's allocator keeps pinned memory
    for the next step. into: a tensor to copy to; None: a new one."""
    gpu = next((place for place in (x.device, target) if place.type == "cuda"), None)
    if gpu is None:
        if into is None:
            into = x.to(target, copy=True, memory_format=torch.contiguous_format)
        else:
            into.copy_(x)
        return here(into)
    x = x.contiguous()
    out = into
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=target, pin_memory=target.type == "cpu")
    stream = _copy_stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        out.copy_(x, non_blocking=True)
        done = stream.record_event()
    return InFlight(done, lambda kept=x: out)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def start_all_reduce(x: Tensor, group: Group, op: str = "sum", in_place: bool = False) -> InFlight:
    """Start an all-reduce of `x` over the group. op: "sum" or "max". in_place: whether the result
    may overwrite `x`."""
    if _is_ordered(x, op):
        return start_maximum(x, group.process_group)
    # Reducing a strided view in place corrupts it silently under gloo.
    is_here = in_place and x.is_contiguous()
    out = x if is_here else x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(out, _reduction(op), group=group.process_group, async_op=True)
    return InFlight(work, lambda: out)


def _is_ordered(x: Tensor, op: str) -> bool:
    """True if a tensor is reduced by `as_ordered_integers`: a floating-point maximum."""
    return op == "max" and x.is_floating_point()


def start_maximum(x: Tensor, group: dist.ProcessGroup | None = None) -> InFlight:
    """Start a maximum of floating-point numbers over a group (None: all ranks); keeps NaN."""
    numbers = as_ordered_integers(x)
    work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)
    return InFlight(work, lambda: from_ordered_integers(numbers, x.dtype))


def start_all_reduces(tensors: Sequence[Tensor], group: Group, op: str) -> list[InFlight]:
    """Start all-reduces of several tensors over the group, in one message per dtype."""
    if any(_is_ordered(x, op) for x in tensors):
        return _start_maxima(tensors, group)
    transfers: list[InFlight] = [here(x) for x in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        if len(chosen) == 1:
            transfers[chosen[0]] = start_all_reduce(tensors[chosen[0]], group, op)
            continue
        terms = [tensors[index] for index in chosen]
        buffer = torch.cat([term.reshape(-1) for term in terms])
        work = dist.all_reduce(buffer, _reduction(op), group=group.process_group, async_op=True)
        parts = buffer.split([term.numel() for term in terms])
        for index, term, part in zip(chosen, terms, parts, strict=True):
            transfers[index] = InFlight(work, partial(part.view, term.shape))
    return transfers


def _start_maxima(tensors: Sequence[Tensor], group: Group) -> list[InFlight]:
    """Start the maxima of several tensors, floating-point ones as ordered integers."""
    numbers = [as_ordered_integers(x) if x.is_floating_point() else x for x in tensors]
    started = start_all_reduces(numbers, group, "max")

    def arrive(x: Tensor, flight: InFlight) -> Tensor:
        largest = flight.arrive()
        return from_ordered_integers(largest, x.dtype) if x.is_floating_point() else largest

    return [
        InFlight(flight.work, partial(arrive, x, flight))
        for x, flight in zip(tensors, started, strict=True)
    ]


SMALL_BYTES = 2**16
"""Up to this size tensors share a message: a message of their own takes longer than a copy."""


def all_reduce_in_place(tensors: Sequence[Tensor], group: Group, op: str = "sum") -> None:
    """All-reduce dense tensors in place ("sum" or "max"). Small tensors share a message."""
    # Tensors reduced as ordered integers are copied in any case, so they join the small ones.
    are_small = [x.nbytes <= SMALL_BYTES or _is_ordered(x, op) for x in tensors]
    small = [x for x, is_small in zip(tensors, are_small, strict=True) if is_small]
    large = [x for x, is_small in zip(tensors, are_small, strict=True) if not is_small]
    started = [
        dist.all_reduce(tensor, _reduction(op), group=group.process_group, async_op=True)
        for tensor in large
    ]
    sums = start_all_reduces(small, group, op)
    for work in started:
        assert work is not None
        work.wait()
    for tensor, total in zip(small, sums, strict=True):
        tensor.copy_(total.wait())


def start_all_gather(x: Tensor, group: Group, dim: int, block: int) -> InFlight:
    """Start an all-gather along `dim`, taking `block` elements of each rank in turn."""
    flat = x.new_empty(group.size * x.numel())
    work = _gather(x.contiguous().view(-1), flat, group)

    def arrive() -> Tensor:
        if group.is_sorted and dim == 0 and block == x.shape[0]:
            return flat.view(group.size * block, *x.shape[1:])
        return merge_blocks(group.by_position(flat.view(group.size, *x.shape)), dim, block)

    return InFlight(work, arrive)


STEPWISE_BYTES = 2**20
"""From this size on, on the CPU, ranks send shards to each other directly: as fast as gloo's
gather, without its second buffer. Gloo gathers smaller shards faster."""


def _gather(shard: Tensor, flat: Tensor, group: Group) -> Any:
    """Gather the shards of all ranks into `flat`, by rank within the process group. On the CPU each
    rank sends large shards to every other rank: gloo's own gather would hold a second buffer as
    large as `flat` during the transfer, and copy it."""
    size, own = shard.numel(), group.own
    is_small = group.size > 2 and shard.nbytes < STEPWISE_BYTES
    if is_small or not shard.is_cpu:
        return gather_single(flat, shard, group=group.process_group, async_op=True)
    works = _Works()
    for step in range(1, group.size):
        goal, source = (own + step) % group.size, (own - step) % group.size
        works.append(
            _exchange(flat[source * size : (source + 1) * size], shard, goal, source, group)
        )
    flat[own * size : (own + 1) * size].copy_(shard)
    return works


def _exchange(out: Tensor, x: Tensor, goal: int, source: int, group: Group) -> Any:
    """Send flat `x` to rank `goal` of the process group, and receive `out` from rank `source`."""
    sent, received = ([0] * group.size for _ in range(2))
    sent[goal], received[source] = x.numel(), out.numel()
    return dist.all_to_all_single(out, x, received, sent, group=group.process_group, async_op=True)


def start_shift(x: Tensor, group: Group) -> InFlight:
    """Start sending `x` to the rank before this one, and receiving the next rank's `x`."""
    x, position = x.contiguous(), group.order.index(group.own)
    goal, source = (group.order[(position + step) % group.size] for step in (-1, 1))
    out = torch.empty_like(x)
    work = _exchange(out.view(-1), x.view(-1), goal, source, group)
    return InFlight(work, lambda kept=x: out)


def start_halo(
    x: Tensor,
    group: Group | None,
    dim: int,
    before: int,
    after: int,
    edge: str = "",
    *,
    adds: bool = False,
) -> InFlight:
    """Start `dist.halo`, or (adds) `dist.halo_add`. group: None if it is one rank."""
    halo, join = (dim, before, after), narrowed if adds else widened
    if group is None:
        return here(join(x, halo, None, None, edge))
    position = group.order.index(group.own)
    sent: list[Tensor] = [x.new_empty(0)] * group.size
    counts = [0] * group.size
    shapes: dict[int, tuple[int, ...]] = {}
    ends = borders(x, halo, adds=adds)
    for step, end, other in ((-1, *ends), (1, *ends[::-1])):
        if 0 <= position + step < group.size:
            rank = group.order[position + step]
            # A neighbour sends from its other end.
            sent[rank], shapes[step], counts[rank] = end.reshape(-1), other.shape, other.numel()
    received = x.new_empty(sum(counts))
    work = dist.all_to_all_single(
        received, torch.cat(sent), counts, list(map(len, sent)), group=group.process_group,
        async_op=True,
    )  # fmt: skip

    def arrive() -> Tensor:
        parts = received.split(counts)
        given = {step: parts[group.order[position + step]].view(shapes[step]) for step in shapes}
        return join(x, halo, given.get(-1), given.get(1), edge)

    return InFlight(work, arrive)


class _Works(list[Any]):
    """Torch's handles of several messages, waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def start_reduce_scatter(x: Tensor, group: Group, dim: int, block: int) -> InFlight:
    """Start a reduce-scatter: this rank gets its shard along `dim` of the sum over the group."""
    if dim == 0 and group.is_sorted and group.size * block == x.shape[0]:
        parts = x.contiguous()
        shape = (block, *x.shape[1:])
    else:
        parts = group.block_cyclic(x, dim, block)
        shape = parts.shape[1:]
    if x.is_cpu:
        return _exchange_and_add(parts.view(group.size, -1), group, shape)
    out = x.new_empty(shape)
    work = scatter_single(out.view(-1), parts.view(-1), group=group.process_group, async_op=True)
    return InFlight(work, lambda kept=parts: out)


def _exchange_and_add(parts: Tensor, group: Group, shape: Sequence[int]) -> InFlight:
    """Reduce-scatter by an all-to-all and a local sum. parts: row i is this rank's term for rank i.
    Gloo's own reduce-scatter is an all-reduce, which sends twice the bytes. If the row of this rank
    is the first or the last, it is left out of the message."""
    own, (ranks, size) = group.own, parts.shape
    is_at_end = own in (0, ranks - 1)
    sent = parts
    if is_at_end:
        sent = parts[1:] if own == 0 else parts[:-1]
    sizes = [0 if is_at_end and rank == own else size for rank in range(ranks)]
    terms = torch.empty_like(sent)
    work = dist.all_to_all_single(
        terms.view(-1), sent.view(-1), sizes, sizes, group=group.process_group, async_op=True
    )

    def arrive() -> Tensor:
        total = terms[0] if len(terms) == 1 else terms.sum(0, dtype=terms.dtype)
        return (total.add_(parts[own]) if is_at_end else total).view(shape)

    return InFlight(work, arrive)


def start_all_to_all(
    x: Tensor, group: Group, dim: int, block: int, from_dim: int, from_block: int
) -> InFlight:
    """Start an all-to-all that gathers `from_dim` over the group and shards `dim` over it."""
    parts = group.block_cyclic(x, dim, block)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group.process_group, async_op=True)
    return InFlight(
        work,
        lambda kept=parts: merge_blocks(group.by_position(received), from_dim, from_block),
    )


def _reduction(op: str) -> Any:
    if op not in _REDUCTIONS:
        raise ValueError(f"dist.all_reduce has op = '{op}'; use 'sum' or 'max'.")
    return _REDUCTIONS[op]
