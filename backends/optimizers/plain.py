"""Plain tensors that replace the DTensor parameters of an optimizer during one step.

They share memory with the DTensors' shards, even those that the step sees as tensors of full
shape (`spread`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.optimizers.shards import (
    beside,
    full_value,
    in_placements_of,
    local_shape,
)
from shardweave.backends.optimizers.spread import Home, Spread, Whole, local_of
from shardweave.ir.torch_private import local_part


class PlainParameters:
    """Plain tensors that replace the optimizer's DTensors during one step.

    parameters: the optimizer's, in order; only DTensors are replaced. full: indices of parameters
    whose update is not elementwise. has_gradient: a flag for each parameter, the same on all ranks.
    """

    def __init__(
        self, parameters: Sequence[Tensor], full: Collection[int], has_gradient: Sequence[bool]
    ) -> None:
        self.made: dict[int, Tensor] = {}
        """Plain tensors by the id of the real tensors."""
        self.of: dict[int, Tensor] = {}
        """Real tensors by the id of the plain tensors."""
        self._full = frozenset(full)
        self._has_gradient = has_gradient
        self._sharded: dict[int, DTensor] = {}
        self._plain: dict[int, nn.Parameter] = {}
        self._index: dict[int, int] = {}
        self._given: dict[int, Tensor | None] = {}
        """Plain gradients before the step, by index of the parameter."""
        for index, real in enumerate(parameters):
            if isinstance(real, DTensor):
                self._sharded[index] = real
                self._plain[index] = self._parameter(index, real)
                self._index[id(real)] = index

    def _parameter(self, index: int, real: DTensor) -> nn.Parameter:
        plain = nn.Parameter(self._value(real, index), requires_grad=real.requires_grad)
        vars(plain).update(vars(real))
        self._keep(real, plain)
        self._take_gradient(index)
        return plain

    def _keep(self, real: Tensor, plain: Tensor) -> Tensor:
        self.made[id(real)], self.of[id(plain)] = plain, real
        return plain

    def _value(self, real: DTensor, index: int) -> Tensor:
        local, shape = local_part(real).detach(), local_shape(real)
        local = local if local.shape == shape else local.view(shape)
        return Spread(Home(local, real)) if index in self._full else local

    def _take_gradient(self, index: int) -> None:
        real, plain = self._sharded[index], self.made[id(self._sharded[index])]
        self._given[index] = plain.grad = None
        if self._has_gradient[index]:
            given = real if real.grad is None else real.grad  # None: on ranks of other stages
            sharded = in_placements_of(given, real)
            self._given[index] = plain.grad = self._value(sharded, index)

    # State beside parameters

    def state_of(self, parameter: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return a function that replaces a tensor of the parameter's optimizer state by a plain
        tensor; None if the parameter is not a DTensor."""
        index = self._index.get(id(parameter))
        if index is None:
            return None
        sharded = self._sharded[index]

        def plain(value: Tensor) -> Tensor:
            if value.ndim and value.shape == sharded.shape:
                own = in_placements_of(value, sharded)
                taken = self._value(own, index)
                return self._keep(value, taken) if own is value else taken
            whole = full_value(value) if isinstance(value, DTensor) else value
            if index not in self._full or not whole.ndim:
                return whole
            return self._keep(value, Whole(whole, sharded)) if whole is value else whole

        return plain

    def stored_state_of(self, plain: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return the inverse of `state_of` for a plain parameter: it turns tensors of the
        parameter's shape into DTensors placed as the parameter. None if `plain` replaces no
        DTensor."""
        parameter = self.of.get(id(plain))
        index = None if parameter is None else self._index.get(id(parameter))
        if index is None:
            return None
        sharded, is_full = self._sharded[index], index in self._full
        shape = tuple(sharded.shape) if is_full else local_shape(sharded)

        def stored(value: Tensor) -> Tensor:
            known = self.of.get(id(value))
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

        return stored

    # Closures, and the end of the step

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap an optimizer closure, which uses the DTensor parameters, for a step on plain ones.
        Before the call plain values and gradients are copied to the DTensors, after it back."""

        def called() -> Any:
            self.give_parameters()
            self.give_gradients()
            result = closure()
            with torch.no_grad():
                for index, plain in self._plain.items():
                    plain.copy_(self._value(self._sharded[index], index))
                    self._take_gradient(index)
            return result

        return called

    @torch.no_grad()
    def give_parameters(self) -> None:
        """Write the plain values to the DTensor parameters, unless they share memory."""
        for index, plain in self._plain.items():
            real = self._sharded[index]
            local = local_of(plain, real) if index in self._full else plain.detach()
            if local.data_ptr() != local_part(real).data_ptr():  # its `.data` was set
                _copy(local, real)

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Write gradients that the step has replaced, or set to None, to the DTensor parameters."""
        for index, plain in self._plain.items():
            real, gradient = self._sharded[index], plain.grad
            if gradient is None:
                real.grad = None if self._has_gradient[index] else real.grad
                continue
            local = local_of(gradient, real) if index in self._full else gradient
            if real.grad is not None and gradient is not self._given[index]:
                real.grad = beside(local, real)


def _copy(local: Tensor, into: DTensor) -> None:
    if into.device_mesh.get_coordinate() is not None:
        local_part(cast("DTensor", into.detach())).copy_(local)
