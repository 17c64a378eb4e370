"""State dicts with whole plain tensors in place of shards, for code that saves files on rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.shards import full_value
from shardweave.backends.state.state import ShardedState, state_of
from shardweave.backends.watch import watchdog
from shardweave.ir.library.philox import STATE
from shardweave.ir.torch_private import pytree


def is_first() -> bool:
    """True if this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


class WholeValues:
    """Gathers DTensors one after another; rank 0 keeps the full values, on the CPU.

    Replicated DTensors need no message.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor for a tensor, always the same one: the full value on rank 0, this
        rank's shard on other ranks, which save nothing. Collective for a sharded tensor."""
        known = self._known.get(id(tensor))
        if known is None:
            value = tensor.detach()
            if isinstance(value, DTensor):
                whole = value.to_local() if is_replicated(value) else full_value(value)
                value = whole.cpu() if is_first() else value.to_local()
            known = self._known[id(tensor)] = value, tensor
        return known[0]


def is_replicated(tensor: Tensor) -> bool:
    """True if every rank has all of a tensor."""
    if not isinstance(tensor, DTensor):
        return True
    everywhere = tensor.device_mesh.size() == dist.get_world_size()
    return everywhere and all(placement.is_replicate() for placement in tensor.placements)


_GATHERED: set[int] = set()
"""Ids of the models whose state dicts are whole now."""


@contextmanager
def whole_state_dicts(modules: Iterable[nn.Module], *, random: bool = False) -> Iterator[None]:
    """Context in which `state_dict` of the compiled models among `modules` has full plain tensors
    on rank 0; tied ones stay one tensor. Collective, unless every rank has the full value of every
    tensor. random: keep the random state, with which a run can be resumed."""
    with ExitStack() as stack:
        for state in filter(None, map(state_of, modules)):
            stack.enter_context(_whole_state_dict(state, random=random))
        yield


@contextmanager
def _whole_state_dict(state: ShardedState, *, random: bool) -> Iterator[None]:
    model = state.model
    if id(model) in _GATHERED or not state.backend.is_joint:
        yield
        return
    own = model.state_dict(keep_vars=True)
    if not random:
        own.pop(STATE, None)
    is_sharded = not all(map(is_replicated, own.values()))
    if is_sharded:
        watchdog.meet("gathering the state of the model", "to save it")
    values = WholeValues()
    whole = {name: values.of(tensor) for name, tensor in own.items()}

    def give(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
        if not random:
            state_dict.pop(prefix + STATE, None)
        state_dict.update({prefix + name: value for name, value in whole.items()})

    _GATHERED.add(id(model))
    hook = model.register_state_dict_post_hook(give)
    try:
        yield
    finally:
        _GATHERED.discard(id(model))
        hook.remove()
    if is_sharded:
        watchdog.meet("gathering the state of the model", "which is saved")


@contextmanager
def whole_optimizer_states(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context in which `optimizer.state_dict()` has full plain tensors on rank 0. Collective. Every
    rank can load such a state directly: the next step of the optimizer shards it."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            values = WholeValues()
            state = pytree.tree_map_only(Tensor, values.of, optimizer.state_dict())

            def give(_: Optimizer, __: dict[str, Any], state: Any = state) -> dict[str, Any]:
                return state

            stack.callback(optimizer.register_state_dict_post_hook(give).remove)
        yield
