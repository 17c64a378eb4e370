"""Updates that need full values of one parameter, each computed by the rank that owns it.

Elementwise ops run on shards. One all-to-all sends the owners the shards that they read, of all
matrices together, and another returns shards of the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.exchange import Layout, layout_of
from shardweave.ir.capture.update.cut import CutUpdate, cut_update
from shardweave.ir.capture.update.held import instances_in
from shardweave.ir.capture.update.ops_seen import is_torchs
from shardweave.ir.capture.update.owners import dealt_out
from shardweave.ir.capture.update.program import capture_update
from shardweave.ir.capture.update.reads import Calls, Reads, Sizes, calls_of
from shardweave.ir.torch_private import local_part, pytree

_Key = tuple[Any, ...]

_SIZE = 512
_MESSAGE_BYTES = 1 << 22
_LATENCY_S = 50e-6
"""Latency of a message. An update that takes less time is computed by every rank itself."""


@dataclass(frozen=True)
class _Cut:
    """A captured update. has_numbers: whether Python numbers are arguments of `parts`."""

    parts: CutUpdate
    has_numbers: bool


_CUTS: WeakKeyDictionary[Optimizer, dict[_Key, _Cut]] = WeakKeyDictionary()

_CALLS: WeakKeyDictionary[Optimizer, tuple[_Key, dict[int, Calls]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Owned:
    """The next update of one parameter. owner: the rank that computes it; None if each rank with
    full values does. state: the optimizer state after the update; tensors that `parts` is still to
    compute are meta tensors in it."""

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
    """Find the updates that owners compute, by index of the parameter; the same on all ranks. An
    update is left out, and its parameter gathered, if it reads tensors of other parameters, is
    computed jointly with others, or cannot be captured."""
    wanted = [i for i in sorted(reads.full - reads.joint) if has_gradient[i]]
    if reads.may_draw or not wanted or not _keeps_only_states(optimizer):
        return {}
    calls = reads.calls
    if is_torchs(optimizer):
        calls = _calls_alike(optimizer, parameters, sizes, has_gradient)
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


def _calls_alike(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    has_gradient: Sequence[bool],
) -> dict[int, Calls]:
    """Find the ops that one of torch's optimizers will run to update each parameter. One
    parameter is examined of all that have equal group settings, shape and state; cached until
    these change."""
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
    for index, (name, has) in enumerate(key):
        if has:
            first.setdefault(name, index)
    chosen = set(first.values())
    looked_at = calls_of(
        optimizer, parameters, sizes, [i in chosen for i in range(len(parameters))]
    )
    calls = {i: looked_at[first[name]] for i, (name, has) in enumerate(key) if has}
    _CALLS[optimizer] = key, calls
    return calls


def _state_key(state: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a state's tensors with dims, and its other leaves."""
    return tuple((tuple(x.shape), x.dtype) if is_array(x) else x for x in pytree.tree_leaves(state))


def _keeps_only_states(optimizer: Optimizer) -> bool:
    """True if an optimizer keeps tensors only in its parameters' states, and no optimizers."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "step")}
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    return not instances_in((own, groups), (Tensor, Optimizer))


def _holds_in_objects(state: Any) -> bool:
    """True if a state has tensors inside objects that pytree does not traverse."""
    leaves = pytree.tree_leaves(state)
    return len(instances_in(state, Tensor)) > sum(isinstance(x, Tensor) for x in leaves)


def _cut_of(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    index: int,
    calls: Calls,
) -> _Cut | None:
    parameter = parameters[index]
    if _holds_in_objects((optimizer.state.get(parameter), calls.state)):
        return None
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
    flops = {
        index: made.parts.flops
        for index, made in cuts.items()
        if not layouts[index].is_replicated or _is_worth_sending(made.parts, device)
    }
    ranks = {index: list(layouts[index].shards) for index in flops}
    return {**dict.fromkeys(cuts), **dealt_out(flops, ranks)}


def _is_worth_sending(parts: CutUpdate, device: torch.device) -> bool:
    """True if ranks should split replicated updates and send results, instead of each computing
    all. Collective. Each of P ranks then saves (P-1)/P of the compute time, and receives (P-1)/P of
    the results."""
    if not parts.results:
        return False
    flops_per_s, bytes_per_s = _rates(parts.results[0].dtype, device)
    result_bytes = sum(x.num_bytes for x in parts.results)
    return parts.flops / flops_per_s > max(result_bytes / bytes_per_s, _LATENCY_S)


@cache
def _rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Measure on rank 0 the FLOP/s of a product, and the bytes/s of an all-to-all. Collective."""
    x = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    size = dist.get_world_size()
    message = message[: _MESSAGE_BYTES // size * size]
    received = torch.empty_like(message)
    product_s = _seconds(lambda: torch.mm(x, x), device)
    exchange_s = _seconds(lambda: dist.all_to_all_single(received, message), device)
    measured = torch.tensor([product_s, exchange_s], dtype=torch.float64, device=device)
    dist.broadcast(measured, src=0)
    product_s, exchange_s = measured.tolist()
    return 2 * _SIZE**3 / product_s, message.numel() * (size - 1) / size / exchange_s


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the shortest of three runs after a warm-up."""
    seconds: list[float] = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def is_array(leaf: Any) -> bool:
    """True if a leaf of a state is a tensor of one or more dims."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0
