"""Updates by owner ranks: an all-to-all of operands, the updates, an all-to-all of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.exchange import Message, exchanged, put, take
from shardweave.backends.optimizers.owners import Owned, is_array
from shardweave.backends.optimizers.shards import beside, full_value, in_placements_of, local_shape
from shardweave.ir.capture.update.cut import Sent
from shardweave.ir.torch_private import local_part, pytree


@torch.no_grad()
def run_owned(optimizer: Optimizer, owned: Sequence[Owned]) -> None:
    """Update the parameters and the optimizer states of `owned`. Collective."""
    rank = dist.get_rank()
    given = [_given(optimizer, each) for each in owned]
    read = [each.parts.before(*x, *each.numbers) for each, x in zip(owned, given, strict=True)]
    device = local_part(owned[0].parameter).device
    full = _gathered(owned, read, device)
    results = [
        each.parts.core(*values, *each.numbers) if _computes(each, rank) else None
        for each, values in zip(owned, full, strict=True)
    ]
    del full, read
    shards = _returned(owned, results, device)
    for each, x, own in zip(owned, given, shards, strict=True):
        _store(optimizer, each, x, each.parts.after(*x, *own, *each.numbers))


def _computes(owned: Owned, rank: int) -> bool:
    return rank == owned.owner if owned.owner is not None else rank in owned.layout.shards


def _given(optimizer: Optimizer, owned: Owned) -> list[Tensor]:
    """Return this rank's shards of the parameter, its gradient and its state tensors."""
    parameter = owned.parameter
    gradient = parameter if parameter.grad is None else parameter.grad  # None: on other stages
    states = [x for x in pytree.tree_leaves(optimizer.state.get(parameter)) if is_array(x)]
    return [_own(x.detach(), parameter) for x in (parameter, gradient, *states)]


def _own(value: Tensor, parameter: DTensor) -> Tensor:
    if value.shape != parameter.shape:
        return full_value(value) if isinstance(value, DTensor) else value
    sharded = in_placements_of(value, parameter)
    return local_part(sharded).detach().view(local_shape(parameter))


def _gathered(
    owned: Sequence[Owned], read: Sequence[Sequence[Tensor]], device: torch.device
) -> list[list[Tensor]]:
    """Gather the values that each update reads: full ones on its owner. Collective."""
    rank = dist.get_rank()
    messages = [
        Message(
            source,
            each.owner,
            each.layout.shape_on(source),
            sent.dtype,
            value if rank == source else None,
        )
        for each, values in zip(owned, read, strict=True)
        for sent, value in zip(each.parts.gathered, values, strict=True)
        if sent.is_sharded and each.owner is not None
        for source in each.layout.sources(each.owner)
    ]
    arrived = iter(exchanged(messages, device))
    full: list[list[Tensor]] = []
    for each, values in zip(owned, read, strict=True):
        full.append([])
        for sent, value in zip(each.parts.gathered, values, strict=True):
            whole = value
            if sent.is_sharded and each.owner is not None:
                shards = {source: next(arrived) for source in each.layout.sources(each.owner)}
                if rank == each.owner:
                    whole = torch.empty(each.layout.shape, dtype=sent.dtype, device=device)
                    for source, shard in shards.items():
                        put(whole, each.layout.shards[source], cast("Tensor", shard))
            full[-1].append(whole)
    return full


def _returned(
    owned: Sequence[Owned], results: Sequence[Sequence[Tensor] | None], device: torch.device
) -> list[list[Tensor]]:
    """Send the owners' results; returns this rank's shards of them, or whole values. Collective."""
    messages: list[Message] = []
    for each, values in zip(owned, results, strict=True):
        for position, sent in enumerate(each.parts.results):
            value = None if values is None else values[position]
            for source, goal in _routes(each, sent):
                shape, own = sent.shape, value
                if sent.is_sharded:
                    shape = each.layout.shape_on(goal)
                    own = None if value is None else take(value, each.layout.shards[goal])
                messages.append(Message(source, goal, shape, sent.dtype, own))
    arrived = iter(exchanged(messages, device))
    shards: list[list[Tensor]] = []
    for each in owned:
        shards.append([])
        for sent in each.parts.results:
            own = [next(arrived) for _ in _routes(each, sent)]
            empty = torch.empty(local_shape(each.parameter), dtype=sent.dtype, device=device)
            shards[-1].append(next((x for x in own if x is not None), empty))
    return shards


def _routes(owned: Owned, sent: Sent) -> list[tuple[int, int]]:
    """Return the (source, goal) ranks of a result's messages; equal if a rank computes its own."""
    ranks = list(owned.layout.shards) if sent.is_sharded else list(range(dist.get_world_size()))
    first = min(owned.layout.shards)
    if owned.owner is not None:
        return [(owned.owner, rank) for rank in ranks]
    return [(rank if rank in owned.layout.shards else first, rank) for rank in ranks]


def _store(
    optimizer: Optimizer, owned: Owned, given: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """Write the new parameter and states; states that the update leaves stay the same objects."""
    parameter = owned.parameter
    given[0].copy_(results[0])
    arrays = iter(results[1:])
    old = pytree.tree_leaves(optimizer.state.get(parameter))
    same = {id(x): leaf for x, leaf in zip(given[2:], filter(is_array, old), strict=True)}
    leaves, spec = pytree.tree_flatten(owned.state)
    new: list[Any] = []
    for position, leaf in enumerate(leaves):
        before = old[position] if len(old) == len(leaves) else None
        if isinstance(leaf, Tensor):
            value = next(arrays) if leaf.is_meta else leaf
            new.append(same.get(id(value)))
            if new[-1] is None:
                new[-1] = _stored(value, before, parameter if _is_like(leaf, parameter) else None)
        else:
            new.append(leaf)
    if leaves:
        optimizer.state[parameter] = pytree.tree_unflatten(new, spec)


def _is_like(leaf: Tensor, parameter: Tensor) -> bool:
    return leaf.ndim > 0 and leaf.shape == parameter.shape


def _stored(value: Tensor, before: Any, like: DTensor | None) -> Tensor:
    """Store a state tensor in the memory of `before` if it fits; `like`: make it a DTensor."""
    kept = local_part(before) if isinstance(before, DTensor) else before
    is_kept = isinstance(before, DTensor) == (like is not None) and isinstance(kept, Tensor)
    if is_kept and like is not None:
        is_kept = before.placements == like.placements
    if is_kept and kept.dtype == value.dtype and kept.numel() == value.numel():
        kept.copy_(value.view(kept.shape))
        return before
    return value.clone() if like is None else beside(value.clone(), like)
