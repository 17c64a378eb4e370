"""Updates that need full values of one parameter, each computed by the rank that owns it.

What is computed element by element runs on shards. What an owner reads goes to it by one
all-to-all of all its matrices, and what it computes back by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.exchange import (
    Layout,
    Message,
    exchanged,
    layout_of,
    put,
    take,
)
from shardweave.backends.optimizers.rates import is_worth_sending
from shardweave.backends.optimizers.shards import (
    beside,
    full_value,
    in_placements_of,
    local_shape,
)
from shardweave.ir.capture.update.cut import CutUpdate, Sent, cut_update
from shardweave.ir.capture.update.program import capture_update
from shardweave.ir.capture.update.reads import Calls, Reads, Sizes, calls_of
from shardweave.ir.torch_private import local_part, pytree

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Cut:
    """An update that was captured. numbers: None if they stand in its parts."""

    parts: CutUpdate
    has_numbers: bool


_CUTS: WeakKeyDictionary[Optimizer, dict[_Key, _Cut]] = WeakKeyDictionary()

_CALLS: WeakKeyDictionary[Optimizer, tuple[_Key, dict[int, Calls]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Owned:
    """The next update of one parameter. owner: None if each rank that has the full values computes
    it. state: as the step leaves it, with tensors on the meta device for those of `parts`."""

    parameter: DTensor
    parts: CutUpdate
    numbers: tuple[float, ...]
    state: Any
    layout: Layout
    owner: int | None


def owned_updates(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    reads: Reads,
    has_gradient: Sequence[bool],
) -> dict[int, Owned]:
    """The updates that owners compute, by index; the same on all ranks.

    They are those of parameters whose full values alone the step needs, and can be captured: one
    that reads other tensors, or that an optimizer computes jointly with others, is left out.
    """
    wanted = [i for i in sorted(reads.full - reads.joint) if has_gradient[i]]
    if reads.may_draw or not wanted or not _keeps_only_states(optimizer):
        return {}
    calls = _calls(optimizer, parameters, sizes, has_gradient)
    cuts: dict[int, _Cut] = {}
    for index in wanted:
        if isinstance(parameters[index], DTensor) and not calls[index].is_joint:
            made = _cut_of(optimizer, parameters, sizes, index, calls[index])
            if made is not None:
                cuts[index] = made
    layouts = {i: layout_of(cast("DTensor", parameters[i])) for i in cuts}
    owners = _owners(cuts, layouts, parameters[0].device)
    return {
        index: Owned(
            cast("DTensor", parameters[index]),
            made.parts,
            calls[index].numbers if made.has_numbers else (),
            calls[index].state,
            layouts[index],
            owners[index],
        )
        for index, made in cuts.items()
    }


def _calls(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    has_gradient: Sequence[bool],
) -> dict[int, Calls]:
    """The calls of the next step. Torch's own classes update parameters of the same group, shape
    and state alike, so that one of them is looked at, and only when something changes."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return calls_of(optimizer, parameters, sizes, has_gradient)
    groups = [
        tuple((k, v) for k, v in group.items() if k != "params")
        for group in optimizer.param_groups
        for _ in group["params"]
    ]
    alike = [
        (group, tuple(p.shape), p.dtype, _state_key(optimizer.state.get(p)))
        for group, p in zip(groups, parameters, strict=True)
    ]
    key = tuple(zip(map(repr, alike), has_gradient, strict=True))
    known = _CALLS.get(optimizer)
    if known is not None and known[0] == key:
        return known[1]
    first: dict[str, int] = {}
    for index, ((name, has), _) in enumerate(zip(key, parameters, strict=True)):
        if has:
            first.setdefault(name, index)
    looked_at = calls_of(
        optimizer, parameters, sizes, [i in first.values() for i in range(len(parameters))]
    )
    calls = {i: looked_at[first[name]] for i, (name, has) in enumerate(key) if has}
    _CALLS[optimizer] = key, calls
    return calls


def _state_key(state: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a state's tensors, and the values of all else."""
    return tuple(
        (tuple(x.shape), x.dtype) if _is_array(x) else x for x in pytree.tree_leaves(state)
    )


def _keeps_only_states(optimizer: Optimizer) -> bool:
    """Say whether all tensors that an optimizer keeps are in the states of its parameters."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "step")}
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    leaves = pytree.tree_leaves((own, groups))
    return not any(isinstance(x, Tensor | Optimizer) for x in leaves)


def _cut_of(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    index: int,
    calls: Calls,
) -> _Cut | None:
    parameter = parameters[index]
    state = [
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None
        for x in pytree.tree_leaves(optimizer.state.get(parameter))
    ]
    key = tuple(parameter.shape), parameter.dtype, tuple(state), calls.ops
    known = _CUTS.setdefault(optimizer, {})
    made = known.get(key) or known.get((*key, calls.numbers))
    if made is None:
        try:
            update = capture_update(optimizer, parameters, sizes, index, calls)
        except Exception:  # noqa: BLE001 - a user's code may raise anything here
            return None
        made = _Cut(cut_update(update, local_part(parameter).device), update.numbers is not None)
        known[key if made.has_numbers else (*key, calls.numbers)] = made
    return made


def _owners(
    cuts: dict[int, _Cut], layouts: dict[int, Layout], device: torch.device
) -> dict[int, int | None]:
    """The largest update goes first, to the rank with least to do."""
    work = dict.fromkeys((rank for layout in layouts.values() for rank in layout.shards), 0)
    owners: dict[int, int | None] = dict.fromkeys(cuts)
    for index in sorted(cuts, key=lambda i: (-cuts[i].parts.flops, i)):
        layout, parts = layouts[index], cuts[index].parts
        if layout.is_replicated and not _is_worth_sending(parts, device):
            continue
        owner = min(layout.shards, key=lambda rank: (work[rank], rank))
        work[owner] += parts.flops
        owners[index] = owner
    return owners


def _is_worth_sending(parts: CutUpdate, device: torch.device) -> bool:
    result_bytes = sum(x.num_bytes for x in parts.results)
    return bool(parts.results) and is_worth_sending(
        parts.flops, result_bytes, parts.results[0].dtype, device
    )


# The step


@torch.no_grad()
def run_owned(optimizer: Optimizer, owned: Sequence[Owned]) -> None:
    """Update parameters and states. Collective."""
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
    """This rank's parts of the parameter, its gradient and its state."""
    parameter = owned.parameter
    gradient = parameter if parameter.grad is None else parameter.grad  # None: on other stages
    states = [x for x in pytree.tree_leaves(optimizer.state.get(parameter)) if _is_array(x)]
    return [_own(x.detach(), parameter) for x in (parameter, gradient, *states)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _own(value: Tensor, parameter: DTensor) -> Tensor:
    if value.shape != parameter.shape:
        return full_value(value) if isinstance(value, DTensor) else value
    sharded = in_placements_of(value, parameter)
    return local_part(sharded).detach().view(local_shape(parameter))


def _gathered(
    owned: Sequence[Owned], read: Sequence[Sequence[Tensor]], device: torch.device
) -> list[list[Tensor]]:
    """The full values that each update of this rank reads."""
    rank = dist.get_rank()
    messages = [
        Message(
            source, each.owner, _sizes(each.layout, source), sent.dtype, _of(value, rank, source)
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
                sources = each.layout.sources(each.owner)
                shards = [next(arrived) for _ in sources]
                if rank == each.owner:
                    whole = _joined(each.layout, sources, shards, sent, device)
            full[-1].append(whole)
    return full


def _joined(
    layout: Layout,
    sources: Sequence[int],
    shards: Sequence[Tensor | None],
    sent: Sent,
    device: torch.device,
) -> Tensor:
    full = torch.empty(layout.shape, dtype=sent.dtype, device=device)
    for source, shard in zip(sources, shards, strict=True):
        put(full, layout.shards[source], cast("Tensor", shard))
    return full


def _of(value: Tensor, rank: int, source: int) -> Tensor | None:
    return value if rank == source else None


def _sizes(layout: Layout, rank: int) -> tuple[int, ...]:
    return tuple(map(len, layout.shards[rank]))


def _returned(
    owned: Sequence[Owned], results: Sequence[Sequence[Tensor] | None], device: torch.device
) -> list[list[Tensor]]:
    """This rank's shards of what owners have computed; whole values go to every rank."""
    messages: list[Message] = []
    for each, values in zip(owned, results, strict=True):
        for position, sent in enumerate(each.parts.results):
            value = None if values is None else values[position]
            for source, goal in _routes(each, sent):
                index = each.layout.shards[goal] if sent.is_sharded else None
                shape = sent.shape if index is None else tuple(map(len, index))
                if value is not None and index is not None:
                    messages.append(Message(source, goal, shape, sent.dtype, take(value, index)))
                else:
                    messages.append(Message(source, goal, shape, sent.dtype, value))
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
    """From where to where a result goes, to those that compute it themselves too."""
    ranks = list(owned.layout.shards) if sent.is_sharded else list(range(dist.get_world_size()))
    first = min(owned.layout.shards)
    if owned.owner is not None:
        return [(owned.owner, rank) for rank in ranks]
    return [(rank if rank in owned.layout.shards else first, rank) for rank in ranks]


def _store(
    optimizer: Optimizer, owned: Owned, given: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    """Write the new parameter and states; what is not new stays as it is."""
    parameter = owned.parameter
    given[0].copy_(results[0])
    arrays = iter(results[1:])
    old = pytree.tree_leaves(optimizer.state.get(parameter))
    same = {id(x): leaf for x, leaf in zip(given[2:], filter(_is_array, old), strict=True)}
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
    """A new state, in the memory of the one before if it fits; that of a shard is a DTensor."""
    kept = local_part(before) if isinstance(before, DTensor) else before
    is_kept = isinstance(before, DTensor) == (like is not None) and isinstance(kept, Tensor)
    if is_kept and like is not None:
        is_kept = before.placements == like.placements
    if is_kept and kept.dtype == value.dtype and kept.numel() == value.numel():
        kept.copy_(value.view(kept.shape))
        return before
    return value.clone() if like is None else beside(value.clone(), like)
