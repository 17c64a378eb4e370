"""Gradients of a step's parameters: accumulated in `.grad`, and reduced over ranks once.

Under `no_sync`, and for the micro-batches of one call, programs leave gradients unreduced where
they can: `.grad` is then a DTensor with a `Partial` placement on each mesh axis that is still to be
summed over. The first call outside of `no_sync` reduces all of them, in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.optimizers.shards import dtensor_of
from shardweave.backends.programs import Key
from shardweave.backends.state.state import ShardedState
from shardweave.backends.step.backend import Pending
from shardweave.backends.step.bound import BoundProgram
from shardweave.backends.step.running import Running
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.torch_private import without_overrides


class Gradients:
    """Adds programs' gradients to the `.grad` of parameters, and tracks which are unreduced."""

    def __init__(self, state: ShardedState) -> None:
        self.backend = state.backend
        self._by_name: dict[str, nn.Parameter] = {}
        for (kind, name), tensor in state.stored.items():
            if kind == "param":
                assert isinstance(tensor, nn.Parameter)
                self._by_name[name] = tensor
        self.parameters = list(self._by_name.values())
        self.keys = [("grad", name) for name in self._by_name]
        self._pending: dict[str, Sharding] = {}
        self._closed: set[str] = set()
        self._called: set[str] = set()
        """Names of parameters whose hooks have run in the current call."""
        self._is_synced = True

    def hooked(self) -> set[str]:
        """Return the names of the parameters with post-accumulate-grad hooks of the user."""
        own = self.backend.take_gradient
        with without_overrides():
            hooks = {n: p._post_accumulate_grad_hooks for n, p in self._by_name.items()}
        return {n for n, of in hooks.items() if of and any(hook != own for hook in of.values())}

    @property
    def are_pending(self) -> bool:
        """True if some `.grad` is unreduced; a `.grad` that the user sets to None no longer
        counts."""
        for name in [name for name in self._pending if self._by_name[name].grad is None]:
            del self._pending[name]
        return bool(self._pending)

    @property
    def are_unfinished(self) -> bool:
        """True if gradients exist and the last call was under `no_sync`: more are to come."""
        return not self._is_synced and any(p.grad is not None for p in self.parameters)

    def _unreduced(self, name: str) -> frozenset[str]:
        pending = self._pending.get(name)
        return frozenset(pending.unreduced if pending else ())

    def program_of(self, bound: BoundProgram, *, is_last: bool) -> BoundProgram:
        """Choose the variant of a call's program: reducing, `pending` or `closing`. is_last:
        whether every gradient has to be reduced after the call."""
        if not self.are_pending:
            return bound if is_last else bound.pending
        closing = bound.closing if is_last else None
        if closing is None:
            return bound.pending
        held = {name: frozenset(s.unreduced) for name, s in self._pending.items()}
        added = {name: frozenset(s.unreduced) for name, s in closing.adds.items()}
        return closing if held.items() <= added.items() else bound.pending

    def into(self, bound: BoundProgram) -> dict[Key, Tensor]:
        """Return the local `.grad` tensors to which a program may add its new gradients, by kind
        and parameter. Kind "pending": the program also reduces the sum, and its result replaces
        `.grad`."""
        self._closed = bound.adds.keys() & self._pending.keys()
        buffers: dict[Key, Tensor] = {}
        for name in self._closed:
            gradient = self._by_name[name].grad
            assert gradient is not None
            buffers["pending", name] = self.backend.local(gradient)
        for key, sharding in bound.results.items():
            if key[0] != "grad":
                continue
            parameter = self._by_name[key[1]]
            if parameter.grad is None or not parameter.requires_grad:
                continue
            if self._unreduced(key[1]) == frozenset(sharding.unreduced):
                buffers[key] = self.backend.local(parameter.grad)
        return buffers

    def take(self, results: Mapping[Key, Tensor], bound: BoundProgram) -> None:
        """Add the gradients among a program's results to `.grad`. A parameter of another stage gets
        an empty `.grad`, since collectives on gradients (such as their norm) need all ranks."""
        for key, sharding in bound.results.items():
            if key[0] != "grad" or key[1] in self._called:
                continue
            parameter = self._by_name[key[1]]
            if key in results:
                self.add(key[1], results[key], sharding)
            elif parameter.grad is None and parameter.requires_grad:
                parameter.grad = self.elsewhere(parameter)

    def take_in_order(self, running: Running, bound: BoundProgram) -> dict[Key, Tensor]:
        """Add each reduced gradient to `.grad` as soon as it is complete, and call its hooks.
        Returns the results that come at the end."""
        for key in bound.runner.order:
            arrived = running.until([key])
            if key in arrived:
                self.add(key[1], arrived.pop(key), bound.results[key])
            if key[1] not in self._pending:
                self._call_hooks(self._by_name[key[1]])
                self._called.add(key[1])
        return running.rest()

    def elsewhere(self, parameter: Tensor) -> Tensor:
        """Return the empty gradient that this rank holds for a parameter of another stage."""
        return self.backend.gradient(torch.empty_like(self.backend.local(parameter)), parameter)

    def add(self, name: str, gradient: Tensor, sharding: Sharding) -> None:
        """Add a gradient with this `sharding` to a parameter's `.grad`; may keep its memory."""
        parameter = self._by_name[name]
        if not parameter.requires_grad:
            return
        if parameter.grad is None or name in self._closed:
            self._set(name, parameter, gradient, sharding)
            return
        held, new = self._unreduced(name), frozenset(sharding.unreduced)
        local = self.backend.local(parameter.grad)
        # A reduced tensor counts once in a sum over ranks: on the first rank.
        if not self.backend.is_first(sorted(new - held)):
            local.zero_()
        if self.backend.is_first(sorted(held - new)):
            local.add_(gradient)
        if new - held:
            axes = tuple(axis for axis in (*sharding.unreduced, *sorted(held - new)))
            self._set(name, parameter, local, Sharding(sharding.dims, axes))

    def _set(self, name: str, parameter: Tensor, local: Tensor, sharding: Sharding) -> None:
        if sharding.unreduced:
            parameter.grad = self.backend.pending(local, sharding)
            self._pending[name] = sharding
        else:
            parameter.grad = self.backend.gradient(local, parameter)
            if self._pending:
                self._pending.pop(name, None)

    def finish(self, *, is_synced: bool) -> None:
        """Reduce gradients after a call, if `is_synced`, and call post-accumulate hooks."""
        if is_synced and self.are_pending:
            pending: dict[str, Pending] = {}
            for name, sharding in self._pending.items():
                gradient = self._by_name[name].grad
                assert gradient is not None
                pending[name] = Pending(gradient, sharding)
            for name, gradient in self.backend.reduced(pending).items():
                self._by_name[name].grad = gradient
            self._pending.clear()
        self.note_sync(is_synced=is_synced)
        for name, parameter in self._by_name.items():
            if name not in self._called:
                self._call_hooks(parameter)
        self._called.clear()

    def _call_hooks(self, parameter: nn.Parameter) -> None:
        hooks = parameter._post_accumulate_grad_hooks
        if hooks and parameter.grad is not None:
            for hook in list(hooks.values()):
                hook(parameter)

    def note_sync(self, *, is_synced: bool) -> None:
        """Record whether the call whose gradients have just arrived was outside of `no_sync`."""
        self._is_synced = is_synced


def micro_batches(inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Split the inputs along dim 0 into `count` micro-batches; each gets all scalars. If an input
    is sharded along dim 0, each rank splits its own rows. Raises ValueError if inputs differ in
    rows or sharding, or `count` does not divide the rows."""
    if type(count) is not int or count < 1:
        raise ValueError(f"accumulate={count!r}; give the number of micro-batches, 1 or more.")
    rows = {name: (tensor.shape[0], _cut(tensor)) for name, tensor in inputs.items() if tensor.ndim}
    again = f"or call the step {count} times, all but the last under step.no_sync()"
    if any(tensor.requires_grad for tensor in inputs.values()):
        raise ValueError(f"accumulate={count}: an input requires a gradient; detach it, {again}.")
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"'{name}' {size}" for name, (size, _) in rows.items())
        raise ValueError(
            f"accumulate={count} splits every input along dim 0, but the inputs differ in their "
            f"number of rows or in their sharding: {sizes}; give all inputs the same, {again}."
        )
    # Of uneven shards the first rank's rows, which every rank can compute.
    local_rows = {_most_rows(tensor) for tensor in inputs.values() if tensor.ndim}
    local_rows |= {tensor.shape[0] for tensor in inputs.values() if tensor.ndim}
    for size in sorted(local_rows):
        if size % count:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"accumulate={count} does not divide the {size} rows of the batch; use one of "
                f"{divisors}, {again}."
            )
    return [
        {name: _part(tensor, index, count) for name, tensor in inputs.items()}
        for index in range(count)
    ]


def _cut(tensor: Tensor) -> str:
    """Describe the placements that shard a DTensor's dim 0; empty for a tensor with all rows."""
    if not isinstance(tensor, DTensor):
        return ""
    cuts = [(i, str(p)) for i, p in enumerate(tensor.placements) if p.is_shard(0)]
    return str(cuts) if cuts else ""


def _most_rows(tensor: Tensor) -> int:
    """Return the number of rows in the first rank's shard of an input."""
    rows = tensor.shape[0]
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard(0):
                rows = -(-rows // tensor.device_mesh.size(dim))
    return rows


def _part(tensor: Tensor, index: int, count: int) -> Tensor:
    if not tensor.ndim:
        return tensor
    if not isinstance(tensor, DTensor):
        return tensor.chunk(count)[index]
    part = tensor.to_local().chunk(count)[index]
    shape = tensor.shape[0] // count, *tensor.shape[1:]
    return dtensor_of(part, tensor.device_mesh, tensor.placements, shape)


def merged(outputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Merge the outputs of micro-batches: floating-point scalars as means, the others as lists."""
    combined: dict[str, Any] = {}
    for name, first in outputs[0].items():
        parts = [output[name] for output in outputs]
        is_mean = first.ndim == 0 and first.is_floating_point()
        combined[name] = torch.stack(parts).mean() if is_mean else parts
    return combined
