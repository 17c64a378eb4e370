"""The state of a step: a model's parameters and buffers, sharded in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.repoint import REPLACED, repoint
from shardweave.backends.optimizers.shards import full_copy
from shardweave.backends.programs import Key
from shardweave.backends.state.checkpoint import checkpointable
from shardweave.backends.state.initial import Source
from shardweave.backends.state.places import TensorPlace, places_of
from shardweave.backends.step.backend import Backend
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import broadcast_from_rank_0, require_same_values
from shardweave.ir.library.philox import STATE, random_state
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.torch_private import memory_key, without_overrides

STEP = "_shardweave_step"
"""The attribute of a compiled model that holds its step."""


_COPY = (
    "Copy values into it (with torch.no_grad(): parameter.copy_(..), or model.load_state_dict); "
    "or call sw.compile on the changed model."
)


def _memory_of(value: Any) -> int:
    """Return an id of a DTensor's memory, which changes if `.data` is set; 0 for other values."""
    return memory_key(value) if isinstance(value, DTensor) else 0


def _are_own(place: TensorPlace) -> bool:
    """Return False if a plain tensor replaces a parameter; raises ValueError for other changes."""
    now = place.held.get(place.name)
    is_other = isinstance(now, Tensor) and not isinstance(now, nn.Parameter)
    if is_other and isinstance(place.tensor, nn.Parameter):
        return False
    if now is not place.tensor:
        raise ValueError(
            f"'{place.path}' of the compiled model was replaced or deleted, but the compiled "
            f"step still uses the old tensor. {_COPY}"
        )
    raise ValueError(
        f"the .data of '{place.path}' was set, which does not reach the shards of a DTensor. "
        f"{_COPY}"
    )


def state_of(module: Any) -> ShardedState | None:
    """Return the sharded state of a compiled model; None for any other object."""
    return getattr(module, "__dict__", {}).get(STEP) if isinstance(module, nn.Module) else None


def own_tensors(model: nn.Module) -> dict[Key, Tensor]:
    """Return a model's parameters and buffers by kind and first name, in order of its modules."""
    first: dict[int, TensorPlace] = {}
    for place in places_of(model):
        first.setdefault(id(place.tensor), place)
    return {(place.kind, place.path): place.tensor for place in first.values()}


class ShardedState:
    """The parameters and buffers of a model, which a backend's stored tensors replace in the model.

    On a mesh of several devices these are DTensors that hold this rank's shard, so that torch's
    optimizers, `clip_grad_norm_` and `torch.distributed.checkpoint` work on them. On one device the
    model keeps its own tensors. Making it is collective.

    shardings: of parameters and buffers by kind and name; others are replicated. sync: whether all
    ranks get the values of rank 0's model; if False, raises AgreementError on every rank unless
    values are equal. sources: by tensor id, initial values to use instead of the tensor's own, of
    which each rank computes or reads its shard. optimizers: optimizers of the model's parameters,
    which then update the new ones.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        shardings: Mapping[Key, Sharding],
        *,
        sync: bool = True,
        sources: Mapping[int, Source] | None = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._model = model
        self._backend = backend
        self._shardings = dict(shardings)
        self._modules = list(model.modules())
        tensors = own_tensors(model)
        sources = sources or {}
        present = {key: tensor for key, tensor in tensors.items() if id(tensor) not in sources}
        values = iter(present.values())
        if backend.is_joint and sync:
            values = broadcast_from_rank_0(list(present.values()), backend.device)
        elif backend.is_joint:
            words = {f"{kind} '{name}'": tensor for (kind, name), tensor in present.items()}
            require_same_values(words)
        self._stored = {
            key: self._put(key, tensor, next(values) if key in present else sources[id(tensor)])
            for key, tensor in tensors.items()
        }
        assert next(values, None) is None
        new = {id(tensor): self._stored[key] for key, tensor in tensors.items()}
        for place in list(places_of(model)):  # tied ones stay tied
            place.held[place.name] = new[id(place.tensor)]
        self._look()
        repoint(optimizers, new, self._placed)
        for (_, name), tensor in tensors.items():
            if new[id(tensor)] is not tensor:
                setattr(tensor, REPLACED, name)
        model.register_state_dict_post_hook(_checkpointable)
        model.register_load_state_dict_pre_hook(_fit)

    def _put(self, key: Key, tensor: Tensor, value: Tensor | Source) -> Tensor:
        """Store `value`; returns the model's new tensor: a DTensor, or on one device `tensor`."""
        sharding = self._shardings.setdefault(key, Sharding.replicated(tensor.ndim))
        made = self._backend.stored(value, sharding, key)
        if isinstance(made, DTensor) or tensor.is_inference() or tensor.is_meta:
            return made if key[0] == "buffer" else self._parameter(made, tensor)
        if value is not tensor or made.device != tensor.device:
            tensor.data = made
        return tensor

    def _parameter(self, made: Tensor, like: Tensor) -> nn.Parameter:
        """Make a parameter; a hook converts gradients of autograd to the backend's form."""
        parameter = nn.Parameter(made, like.requires_grad)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._backend.take_gradient)
        return with_attributes_of(like, parameter)

    def _look(self) -> None:
        """Record the places of the stored tensors in the model, to detect replacements."""
        self._keys = {id(tensor): key for key, tensor in self._stored.items()}
        self._places = [
            (place, _memory_of(place.tensor))
            for place in places_of(self._model)
            if id(place.tensor) in self._keys
        ]

    def _placed(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Shard a tensor of a parameter's shape as the parameter is."""
        key = self._keys[id(parameter)]
        return self._backend.stored(value, self._shardings[key], key)

    def has_own_tensors(self) -> bool:
        """True if the model's parameters are the stored ones now. False if plain tensors replace
        them, such as under `torch.func.functional_call`, or weights computed from parameters.

        Raises ValueError if another parameter or buffer has replaced a stored one, or if it was
        deleted: programs would go on with the old one.
        """
        with without_overrides():
            for place, memory in self._places:
                *_, held, name, value = place
                if held.get(name) is not value or (memory and _memory_of(value) != memory):
                    return _are_own(place)
        return True

    def copied(self, model: nn.Module, memo: Mapping[int, Any]) -> Self:
        """Copy the state for `model`, a deep copy made with `memo`."""
        new = copy.copy(self)
        new._model = model
        new._modules = list(model.modules())
        new._stored = {key: memo[id(tensor)] for key, tensor in self._stored.items()}
        for tensor in new._stored.values():
            if isinstance(tensor, DTensor) and tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._backend.take_gradient)
        new._shardings = dict(self._shardings)
        new._look()
        return new

    @property
    def model(self) -> nn.Module:
        """The model that has the tensors."""
        return self._model

    @property
    def backend(self) -> Backend:
        """The backend that holds the tensors."""
        return self._backend

    @property
    def stored(self) -> Mapping[Key, Tensor]:
        """Parameters and buffers by kind and first name."""
        return self._stored

    @property
    def shardings(self) -> Mapping[Key, Sharding]:
        """The shardings of the tensors, by kind and name."""
        return self._shardings

    @property
    def modes(self) -> Sequence[nn.Module]:
        """The modules whose training modes affect programs, in the order of `model.modules()`."""
        return self._modules

    def draw_from(self, seed: int) -> None:
        """Register a buffer `random_state` on the model, from which programs draw. Raises
        ValueError if the model has an attribute of that name already."""
        model = self._model
        if hasattr(model, STATE):
            raise ValueError(
                f"the model has an attribute '{STATE}', the name under which a step stores its "
                "random state; rename the attribute."
            )
        state, key = random_state(seed), ("buffer", STATE)
        sharding = self._shardings.setdefault(key, Sharding.replicated(state.ndim))
        self._stored[key] = self._backend.stored(state, sharding, key)
        model.register_buffer(STATE, self._stored[key])
        self._look()

    # Checkpoints

    def full_state_dict(self) -> dict[str, Any]:
        """Return the model's `state_dict` with whole plain tensors on every rank. Collective."""
        if self._backend.is_joint:
            watchdog.meet("step.full_state_dict", "the state")
        own = self._model.state_dict(keep_vars=True)
        return {name: full_copy(tensor) for name, tensor in own.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients of all parameters by name; zeros for None. Collective."""
        return {name: full_copy(self._gradient(p)) for name, p in self._model.named_parameters()}

    def full_buffers(self) -> dict[str, Tensor]:
        """Gather all buffers on every rank, by name. Collective."""
        return {name: full_copy(buffer) for name, buffer in self._model.named_buffers()}

    def _gradient(self, parameter: Tensor) -> Tensor:
        if parameter.grad is not None:
            return parameter.grad
        if id(parameter) not in self._keys:
            return torch.zeros_like(parameter)
        return self._backend.like(torch.zeros_like(self._backend.local(parameter)), parameter)

    def fit(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert the entries of a `state_dict` that is loaded to the form of the stored tensors.
        If it has a random state, the model gets one even if no program draws; if it lacks one, the
        model keeps its own. Raises ValueError for a tensor of another shape."""
        if prefix + STATE in state_dict and ("buffer", STATE) not in self._stored:
            self.draw_from(0)
        for place, _ in self._places:
            path = prefix + place.path
            value = state_dict.get(path)
            if isinstance(value, Tensor):
                state_dict[path] = self._fitted(place.path, value, place.tensor)
            elif place.path == STATE:
                state_dict[path] = place.tensor

    def _fitted(self, name: str, value: Tensor, stored: Tensor) -> Tensor:
        """Convert a tensor to the form of the stored one. Raises ValueError for another shape."""
        if not isinstance(value, DTensor) and tuple(value.shape) != tuple(stored.shape):
            raise ValueError(
                f"load_state_dict: '{name}' has shape {tuple(value.shape)}, expected the global "
                f"shape {tuple(stored.shape)}."
            )
        return self._backend.fitted(value, stored, self._shardings[self._keys[id(stored)]])


def with_attributes_of(old: Tensor, new: nn.Parameter) -> nn.Parameter:
    """Copy the attributes and hooks of the tensor `old` to a new parameter; returns `new`."""
    vars(new).update(vars(old))
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new


def _checkpointable(module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
    del module, prefix, metadata
    checkpointable(state_dict)


def _fit(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    """Fit a state dict before it is loaded; raises ValueError for `assign=True`."""
    del rest
    state = state_of(module)
    if state is None:
        return
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict: a compiled model keeps its tensors and copies values into them; "
            "remove assign=True."
        )
    state.fit(state_dict, prefix)
