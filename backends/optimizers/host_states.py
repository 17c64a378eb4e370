"""Optimizer states that live on the host, and stream through the device during an update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardweave.backends.optimizers.shards import beside, shapes_of_shards
from shardweave.ir.capture.update.held import instances_in, mapped
from shardweave.ir.capture.update.streams import stream_groups
from shardweave.ir.torch_private import local_part


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
"""The state tensors that are on the host; used as a set."""


def keep_states(parameters: Iterable[Tensor], copies: Copies) -> None:
    """Keep the optimizer states of these parameters on the host between updates from now on."""
    for parameter in parameters:
        _COPIES[parameter] = copies


def copies_of(parameters: Iterable[Tensor]) -> Copies | None:
    """Return the object that copies these parameters' states; None if states stay on the device."""
    return next((_COPIES[x] for x in parameters if x in _COPIES), None)


class _Leaving(NamedTuple):
    """The copies to the host of the tensors in `state[key]`."""

    state: Any
    key: Any
    flights: dict[int, tuple[Tensor, Tensor | None, _InFlight]]
    """By the id of a state tensor on the device: the tensor, its old tensor on the host if it has
    one, and its copy to the host."""


class HostStates:
    """Moves the states of an optimizer through the device during one update.

    groups: parameters by index. The update runs group by group; meanwhile the next group's states
    arrive, and the previous group's leave. Call `enter` and `leave` for each group, then `finish`.
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
        """By the id of a tensor on the device: the tensor, and its tensor on the host."""
        self._arriving: list[tuple[Any, Any, dict[int, tuple[Tensor, _InFlight]]]] = []
        self._leaving: list[_Leaving] = []
        self._last: Any = None
        """The last copy to the host that has been waited for on the device's stream."""
        self._begin(0)

    def enter(self, index: int) -> None:
        """Wait for a group's states, and start to copy the next group's to the device."""
        for state, key, flights in self._arriving:
            made = {at: _with_local(home, x.wait()) for at, (home, x) in flights.items()}
            for at, (home, _) in flights.items():
                self._homes[id(made[at])] = made[at], home
            _replace(state, key, made)
        self._begin(index + 1)

    def leave(self, index: int) -> None:
        """Wait for the previous group's copies to the host, and start this group's."""
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
        for _, _, flights in self._arriving:  # none, unless an update raised an error
            for _, flight in flights.values():
                flight.wait()
        self._settle()
        if self._last is not None:
            self._last.synchronize()

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
                self._last = flight.work or self._last
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
    update: Callable[[Optimizer, Sequence[Tensor]], None],
) -> None:
    """Update groups of parameters, given by index, each while its states are on the device.

    update: runs the step of the optimizer, which then has these parameters alone.
    """
    host = HostStates(optimizer, parameters, groups, copies)
    owners = [group for group in optimizer.param_groups for _ in group["params"]]
    try:
        for index, group in enumerate(groups):
            host.enter(index)
            with _only(optimizer, [(owners[i], parameters[i]) for i in group]):
                update(optimizer, [parameters[i] for i in group])
            host.leave(index)
    finally:
        host.finish()


def bring(optimizer: Optimizer, parameters: Sequence[Tensor], copies: Copies) -> Callable[[], None]:
    """Bring all states to the device. Returns a function that sends them back to the host."""
    host = HostStates(optimizer, parameters, [range(len(parameters))], copies)
    host.enter(0)

    def end() -> None:
        host.leave(0)
        host.finish()

    return end


@contextmanager
def _only(optimizer: Optimizer, chosen: Sequence[tuple[dict[str, Any], Tensor]]) -> Iterator[None]:
    """Context in which an optimizer of torch has only some of its parameters, with their states.
    chosen: each parameter, after its group."""
    groups, states = optimizer.param_groups, optimizer.state
    parts: dict[int, dict[str, Any]] = {}
    for group, parameter in chosen:
        parts.setdefault(id(group), {**group, "params": []})["params"].append(parameter)
    optimizer.param_groups = list(parts.values())
    optimizer.state = defaultdict(dict, {x: states[x] for _, x in chosen if x in states})
    try:
        yield
    finally:
        states.update(optimizer.state)
        optimizer.param_groups, optimizer.state = groups, states


def without_parameters(optimizer: Optimizer) -> Optimizer:
    """Copy an optimizer of torch without its parameters: a step of the copy updates nothing."""
    made = object.__new__(type(optimizer))
    vars(made).update({**vars(optimizer), "param_groups": []})
    return made


def groups_of(parameters: Sequence[Tensor], has_gradient: Sequence[bool]) -> list[list[int]]:
    """Group the parameters that have gradients, in order, for their states to stream; the groups
    are the same on all ranks."""
    updated = [index for index, has in enumerate(has_gradient) if has]
    sizes = [_num_bytes(parameters[index]) for index in updated]
    return [[updated[i] for i in group] for group in stream_groups(sizes)]


def _num_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's largest shard."""
    shape = shapes_of_shards(x)[0] if isinstance(x, DTensor) else x.shape
    return torch.Size(shape).numel() * x.element_size()


def _arrays(state: Any) -> list[Tensor]:
    return [x for x in instances_in(state, Tensor) if x.ndim]


def _replace(state: Any, key: Any, new: dict[int, Tensor]) -> None:
    if new:
        state[key] = mapped(state[key], lambda x: new.get(id(x), x))


def _local(x: Tensor) -> Tensor:
    return local_part(x).detach() if isinstance(x, DTensor) else x.detach()


def _with_local(like: Tensor, local: Tensor) -> Tensor:
    return beside(local, like) if isinstance(like, DTensor) else local
