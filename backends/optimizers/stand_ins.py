"""Stand-ins for optimizers of DTensors: of the same class and state, on plain tensors.

The plain tensors share memory with the DTensors' shards, even those that the step sees as tensors
of full shape (`spread`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardweave.backends.optimizers.shards import (
    beside,
    full_value,
    in_placements_of,
    local_shape,
)
from shardweave.backends.optimizers.spread import Home, Spread, Whole, local_of
from shardweave.ir.capture.update.held import mapped, with_entries
from shardweave.ir.capture.update.reads import FORMS
from shardweave.ir.torch_private import local_part

_OWN = ("param_groups", "state", "step")


class StandIns:
    """Stand-ins, during one step, for an optimizer, for optimizers that it holds, and for their
    DTensors.

    parameters: the optimizer's, in order; only DTensors are replaced. full: indices of parameters
    whose update is not elementwise. has_gradient: a flag for each parameter, the same on all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        full: Collection[int],
        has_gradient: Sequence[bool],
    ) -> None:
        self._made: dict[int, Any] = {}
        """Stand-ins by the id of the real object: tensors, groups, states, optimizers, others."""
        self._of: dict[int, Any] = {}
        """Real objects by the id of their stand-ins."""
        self._full = frozenset(full)
        self._has_gradient = has_gradient
        self._sharded = {i: p for i, p in enumerate(parameters) if isinstance(p, DTensor)}
        self._index = {id(real): index for index, real in self._sharded.items()}
        self._given: dict[int, Tensor | None] = {}
        """Plain gradients before the step, by index of the parameter."""
        self._plain = {index: self._parameter(index) for index in self._sharded}
        self._pairs: list[tuple[Optimizer, Optimizer]] = []
        self._objects: list[tuple[Any, Any, Any]] = []
        """Objects that hold tensors, their stand-ins, and the state's key under which they are."""
        self.first = self._stand_in(optimizer)

    def _keep(self, real: Any, made: Any) -> Any:
        self._made[id(real)], self._of[id(made)] = made, real
        return made

    # Optimizers

    def _stand_in(self, real: Optimizer) -> Optimizer:
        made = object.__new__(type(real))
        self._keep(real, made)
        self._pairs.append((real, made))
        own = vars(real)
        for name, make in (("param_groups", self._groups), ("state", self._state)):
            if name in own:  # else it is that of an optimizer which this one holds
                is_known = id(own[name]) in self._made
                vars(made)[name] = self._made[id(own[name])] if is_known else make(own[name])
        for name, value in own.items():
            if name not in _OWN:
                vars(made)[name] = self._for(value)
        return made

    def _groups(self, real: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._keep(real, [self._keep(group, self._group(group)) for group in real])

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        parameters = [self._made.get(id(p), p) for p in group["params"]]
        forms = FORMS if any(isinstance(p, Spread) for p in parameters) else ()
        return {**group, "params": parameters, **{key: False for key in forms if key in group}}

    def _state(self, real: dict[Any, Any]) -> defaultdict[Any, Any]:
        made: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in real.items():
            made[self._made.get(id(key), key)] = self._for(value, key)
        return self._keep(real, made)

    def _for(self, value: Any, key: Any = None) -> Any:
        """Copy a value with stand-ins for real objects. key: its key in the state, if any."""
        index = self._index.get(id(key))

        def change(x: Any) -> Any:
            if index is None and _is_by_id(x, self._index):
                return with_entries(
                    x, {_partner(k, self._made): self._for_id(k, y) for k, y in x.items()}
                )
            if index is not None and isinstance(x, Tensor):
                return self._plain_state(x, index)
            is_new = isinstance(x, Optimizer) and id(x) not in self._made
            return self._stand_in(x) if is_new else _partner(x, self._made)

        copies: list[tuple[Any, Any]] = []
        made = mapped(value, change, copies)
        for old, new in copies:
            self._objects.append((old, self._keep(old, new), self._made.get(id(key), key)))
        return made

    def _for_id(self, key: Any, value: Any) -> Any:
        """Copy as `_for` the entry of a dict whose keys are the ids of parameters."""
        return self._for(value, self._sharded.get(self._index.get(key, -1)))

    def _real(self, made: Any, key: Any = None) -> Any:
        """Copy a value with real objects for stand-ins. key: its key in the state, if any."""
        index = self._index.get(id(self._of.get(id(key))))
        plain = {id(made): made for made in self._plain.values()}

        def change(x: Any) -> Any:
            if index is None and _is_by_id(x, plain):
                real = {_partner(k, self._of): self._real(y, plain.get(k)) for k, y in x.items()}
                return with_entries(x, real)
            if index is not None and isinstance(x, Tensor):
                return self._stored_state(x, index)
            return _partner(x, self._of)

        return mapped(made, change)

    def give_back(self) -> None:
        """Copy the results of the step from the stand-ins to the real optimizers and parameters."""
        self._give_parameters()
        self._give_gradients()
        for object_, made, key in self._objects:
            left = {name: self._real(value, key) for name, value in vars(made).items()}
            vars(object_).clear()
            vars(object_).update(left)
        for real, made in self._pairs:
            if "param_groups" in vars(real):
                for group, left in zip(real.param_groups, made.param_groups, strict=True):
                    kept = ("params", *FORMS)
                    group.update({key: value for key, value in left.items() if key not in kept})
            if "state" in vars(real):
                left = {
                    self._of.get(id(key), key): self._real(x, key) for key, x in made.state.items()
                }
                real.state.clear()
                real.state.update(left)
            if "step" in vars(real):  # wrapped by a scheduler of torch, to see that it was called
                vars(made)["_opt_called"] = True
            for name, value in vars(made).items():
                if name not in _OWN:
                    vars(real)[name] = self._real(value)

    # Parameters, by index, and the state beside them

    def _parameter(self, index: int) -> nn.Parameter:
        real = self._sharded[index]
        plain = nn.Parameter(self._value(real, index), requires_grad=real.requires_grad)
        vars(plain).update(vars(real))
        self._take_gradient(index, plain)
        return self._keep(real, plain)

    def _value(self, real: DTensor, index: int) -> Tensor:
        local, shape = local_part(real).detach(), local_shape(real)
        local = local if local.shape == shape else local.view(shape)
        return Spread(Home(local, real)) if index in self._full else local

    def _take_gradient(self, index: int, plain: Tensor) -> None:
        real = self._sharded[index]
        self._given[index] = plain.grad = None
        if self._has_gradient[index]:
            given = real if real.grad is None else real.grad  # None: on ranks of other stages
            sharded = in_placements_of(given, real)
            self._given[index] = plain.grad = self._value(sharded, index)

    def _plain_state(self, value: Tensor, index: int) -> Tensor:
        """Return a plain tensor for a tensor of the parameter's optimizer state."""
        sharded = self._sharded[index]
        if value.ndim and value.shape == sharded.shape:
            own = in_placements_of(value, sharded)
            taken = self._value(own, index)
            return self._keep(value, taken) if own is value else taken
        whole = full_value(value) if isinstance(value, DTensor) else value
        if index not in self._full or not whole.ndim:
            return whole
        return self._keep(value, Whole(whole, sharded)) if whole is value else whole

    def _stored_state(self, value: Tensor, index: int) -> Tensor:
        """Invert `_plain_state`: tensors of the parameter's shape become DTensors placed as it."""
        sharded, is_full = self._sharded[index], index in self._full
        shape = tuple(sharded.shape) if is_full else local_shape(sharded)
        known = self._of.get(id(value))
        if isinstance(value, Whole):
            return value.value
        if known is not None and isinstance(value, Spread):
            value.home.read_views()
            return known
        if not is_full and known is not None:
            return known
        if not value.ndim or tuple(value.shape) != shape:
            return value
        local = local_of(value, sharded) if is_full else value
        if isinstance(known, DTensor) and known.dtype == value.dtype:
            _copy(local, known)
            return known
        return beside(local, sharded)

    # Closures, and the end of the step

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap an optimizer closure, which uses the DTensor parameters, for a step on plain ones.
        Before the call plain values and gradients are copied to the DTensors, after it back."""

        def called() -> Any:
            self._give_parameters()
            self._give_gradients()
            result = closure()
            with torch.no_grad():
                for index, plain in self._plain.items():
                    plain.copy_(self._value(self._sharded[index], index))
                    self._take_gradient(index, plain)
            return result

        return called

    @torch.no_grad()
    def _give_parameters(self) -> None:
        """Write the plain values to the DTensor parameters, unless they share memory."""
        for index, plain in self._plain.items():
            real = self._sharded[index]
            local = local_of(plain, real) if index in self._full else plain.detach()
            if local.data_ptr() != local_part(real).data_ptr():  # its `.data` was set
                _copy(local, real)

    @torch.no_grad()
    def _give_gradients(self) -> None:
        """Write gradients that the step has replaced, or set to None, to the DTensor parameters."""
        for index, plain in self._plain.items():
            real, gradient = self._sharded[index], plain.grad
            if gradient is None:
                real.grad = None if self._has_gradient[index] else real.grad
                continue
            local = local_of(gradient, real) if index in self._full else gradient
            if real.grad is not None and gradient is not self._given[index]:
                real.grad = beside(local, real)


def _partner(x: Any, objects: dict[int, Any]) -> Any:
    """Return the counterpart of `x`; its id, if `x` is the id of an object; `x` if it has none."""
    if type(x) is int and x in objects:  # as a key by which a tensor is known
        return id(objects[x])
    return objects.get(id(x), x)


def _is_by_id(value: Any, ids: Collection[int]) -> bool:
    """True for a dict with entries by the ids of parameters; a tensor's hash is its id too."""
    return isinstance(value, dict) and any(type(key) is int and key in ids for key in value)


def _copy(local: Tensor, into: DTensor) -> None:
    if into.device_mesh.get_coordinate() is not None:
        local_part(cast("DTensor", into.detach())).copy_(local)
