"""Optimizer states that live on the host between updates, and stream through the device in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardweave.ir.capture.update.held import instances_in, mapped
from shardweave.ir.capture.update.streams import stream_groups
from shardweave.ir.torch_private import dtensor_spec, local_part


class _InFlight(Protocol):
    work: Any

    def wait(self) -> Tensor: ...


class Copies(Protocol):
    """Copies between a device and its host, as a `Runtime` makes them."""

    device: torch.device

    def start_to_host(self, x: Tensor, into: Tensor | None = None) -> _InFlight: ...

    def start_to_device(self, x: Tensor) -> _InFlight: ...


_COPIES = WeakIdKeyDictionary()
"""The copies of each parameter whose states are kept on the host."""

_HOMES = WeakIdKeyDictionary()
"""Set of the state tensors that are on the host."""


def keep_states(parameters: Iterable[Tensor], copies: Copies) -> None:
    """Keep the optimizer states of these parameters on the host between updates from now on."""
    for parameter in parameters:
        _COPIES[parameter] = copies


def copies_of(parameters: Iterable[Tensor]) -> Copies | None:
    """Return how states of these parameters are copied; None if they stay on the device."""
    return next((_COPIES[x] for x in parameters if x in _COPIES), None)


class _Leaving(NamedTuple):
    state: Any
    key: Any
    flights: dict[int, tuple[Tensor, Tensor | None, _InFlight]]
    """By the id of a state tensor: itself, its tensor on the host if it has one, and the copy."""


class HostStates:
    """Streams optimizer states to the device and back, group by group, during one update.

    groups: indices of parameters. While a group is updated, the states of the next group arrive and
    the last group's leave. Call `enter` and `leave` for each group in turn, then `finish`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        groups: Sequence[Sequence[int]],
        copies: Copies,
    ) -> None:
        self._states = [each.state for each in instances_in(optimizer, Optimizer)]
        self._groups = [[parameters[index] for index in group] for group in groups]
        self._copies = copies
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}
        """By the id of a tensor on the device: itself, and its tensor on the host."""
        self._arriving: list[tuple[Any, Any, dict[int, tuple[Tensor, _InFlight]]]] = []
        self._leaving: list[_Leaving] = []
        self._begin(0)

    def enter(self, index: int) -> None:
        """Wait for the states of a group, and start to copy the next group's."""
        for state, key, flights in self._arriving:
            made = {at: _with_local(home, x.wait()) for at, (home, x) in flights.items()}
            for at, (home, _) in flights.items():
                self._homes[id(made[at])] = made[at], home
            _replace(state, key, made)
        self._begin(index + 1)

    def leave(self, index: int) -> None:
        """Start to copy a group's states to the host, once the previous group's have arrived."""
        self._settle()
        for state, key in self._of_group(index):
            flights: dict[int, tuple[Tensor, Tensor | None, _InFlight]] = {}
            for x in _arrays(state[key]):
                if x not in _HOMES:
                    _, home = self._homes.pop(id(x), (x, None))
                    if home is not None and home.dtype != x.dtype:
                        home = None
                    into = None if home is None else _local(home)
                    flights[id(x)] = x, home, self._copies.start_to_host(_local(x), into)
            self._leaving.append(_Leaving(state, key, flights))

    def finish(self) -> None:
        """Wait until all states are on the host, where they may be read at once."""
        works = [flight.work for each in self._leaving for _, _, flight in each.flights.values()]
        self._settle()
        for work in filter(None, works[-1:]):
            work.synchronize()

    def _begin(self, index: int) -> None:
        self._arriving = [
            (state, key, {id(x): (x, self._copies.start_to_device(_local(x))) for x in away})
            for state, key in self._of_group(index)
            if (away := [x for x in _arrays(state[key]) if x in _HOMES])
        ]

    def _settle(self) -> None:
        for state, key, flights in self._leaving:
            made: dict[int, Tensor] = {}
            for at, (x, home, flight) in flights.items():
                local = flight.wait()
                made[at] = _with_local(x, local) if home is None else home
                _HOMES[made[at]] = True
            _replace(state, key, made)
        self._leaving = []

    def _of_group(self, index: int) -> list[tuple[Any, Any]]:
        group = self._groups[index] if index < len(self._groups) else []
        return [(state, key) for state in self._states for key in group if key in state]


def send_away(optimizer: Optimizer) -> None:
    """Copy an optimizer's states to the host, if its parameters' states are kept there."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    copies = copies_of(parameters)
    if copies is not None:
        host = HostStates(optimizer, parameters, [(), range(len(parameters))], copies)
        host.leave(1)
        host.finish()


def stream(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    copies: Copies,
    update: Callable[[Sequence[int]], None],
) -> Callable[[], None]:
    """Update all groups but the last, each while its states are on the device, and bring those of
    the last. Returns a function to call after the last group's update.

    groups: indices of parameters. update: updates a group.
    """
    host = HostStates(optimizer, parameters, groups, copies)
    for index, group in enumerate(groups[:-1]):
        host.enter(index)
        update(group)
        host.leave(index)
    last = len(groups) - 1
    host.enter(last)

    def end() -> None:
        host.leave(last)
        host.finish()

    return end


def groups_of(
    parameters: Sequence[Tensor], has_gradient: Sequence[bool] | None
) -> Sequence[Sequence[int]]:
    """Group the parameters that have gradients, in order, to stream their states group by group.
    has_gradient: None makes one group of all, if a step must update them together."""
    everything = [range(len(parameters))]
    if has_gradient is None:
        return everything
    updated = [index for index, has in enumerate(has_gradient) if has]
    sizes = [_local(parameters[i]).numel() * parameters[i].element_size() for i in updated]
    return [[updated[i] for i in group] for group in stream_groups(sizes)] or everything


def _arrays(state: Any) -> list[Tensor]:
    return [x for x in instances_in(state, Tensor) if x.ndim]


def _replace(state: Any, key: Any, new: dict[int, Tensor]) -> None:
    if new:
        state[key] = mapped(state[key], lambda x: new.get(id(x), x))


def _local(x: Tensor) -> Tensor:
    return local_part(x).detach() if isinstance(x, DTensor) else x.detach()


def _with_local(like: Tensor, local: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        return DTensor(local, dtensor_spec(like), requires_grad=False)
    return local
