"""A run of a program, whose results are taken as they become complete, in memory of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from shardweave.backends.programs import Key
from shardweave.backends.step.backend import Runner
from shardweave.passes.stages.split_step import KEPT

_K = TypeVar("_K")


class Running:
    """Runs a program up to the results that are asked for. Collective.

    given: arguments by key; the runner may remove them. into: gradients among them that the runner
    may add to in place; those that it has added to are left out of the results. shared: keys of
    results that may share memory with others or with arguments; these are copied if they do.
    Results of kind `kept` are returned as they are. in_order: whether to stop at gradients; else
    the whole program runs at once. guard: a context in which an error of the program is raised.
    """

    def __init__(
        self,
        runner: Runner,
        given: dict[Key, Tensor],
        into: Mapping[Key, Tensor],
        shared: Collection[Key],
        guard: AbstractContextManager[None],
        *,
        in_order: bool,
    ) -> None:
        self._into = into
        self._shared = shared
        self._held = memory_of(given.values()) if shared else {}
        self._guard = guard
        self._results: dict[Key, Tensor] = {}
        self._owned: set[Key] = set()
        run = runner.in_order if in_order else partial(Runner.in_order, runner)
        self._run: Iterator[None] | None = run(given, self._results)
        guard.__enter__()

    def until(self, keys: Collection[Key]) -> dict[Key, Tensor]:
        """Run until some results are complete; returns those that are not added to `into`."""
        while self._run is not None and any(key not in self._results for key in keys):
            self._resume()
        return self._taken(key for key in keys if key in self._results)

    def rest(self) -> dict[Key, Tensor]:
        """Run to the end; returns the results that were not taken before."""
        while self._run is not None:
            self._resume()
        return self._taken(list(self._results))

    def _taken(self, keys: Iterable[Key]) -> dict[Key, Tensor]:
        taken = {key: self._results.pop(key) for key in keys}
        self._owned -= taken.keys()
        return {key: x for key, x in taken.items() if x is not self._into.get(key)}

    @torch.no_grad()
    def _resume(self) -> None:
        assert self._run is not None
        try:
            if next(self._run, self) is self:
                self._run = None
        except BaseException as error:
            self._run = None
            self._guard.__exit__(type(error), error, error.__traceback__)
            raise
        if self._run is None:
            self._guard.__exit__(None, None, None)
        self._own()

    def _own(self) -> None:
        """Give results memory of their own. Those that share memory arrive together, at the end."""
        results, into = self._results, self._into
        fresh = [
            key
            for key, x in results.items()
            if key not in self._owned and key[0] != KEPT and x is not into.get(key)
        ]
        results.update({key: results[key].contiguous() for key in fresh})
        shared = {key: results[key] for key in fresh if key in self._shared}
        results.update(owned(shared, self._held) if shared else {})
        self._owned.update(results)


def memory_of(tensors: Iterable[Any]) -> dict[int, ref[Any]]:
    """Return weak references to the storages of the tensors among some values, by address."""
    storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor) and x.numel()]
    return {storage.data_ptr(): ref(storage) for storage in storages}


def owned(results: Mapping[_K, Tensor], held: Mapping[int, ref[Any]]) -> dict[_K, Tensor]:
    """Make results contiguous, and copy those that share memory with another or with `held`.

    A program may return a value twice, or a view of an argument; but gradients and buffers
    are changed in place. Results in disjoint parts of one buffer are not copied. held: as
    `memory_of` returns.
    """
    tensors = {key: tensor.contiguous() for key, tensor in results.items()}
    end = 0
    filled = [key for key in tensors if tensors[key].numel()]
    for key in sorted(filled, key=lambda key: tensors[key].data_ptr()):
        tensor = tensors[key]
        storage = held.get(tensor.untyped_storage().data_ptr())
        is_held = storage is not None and storage() is not None
        if is_held or tensor.data_ptr() < end:
            tensors[key] = tensor.clone()
        if not is_held:
            end = max(end, tensor.data_ptr() + tensor.nbytes)
    return tensors
