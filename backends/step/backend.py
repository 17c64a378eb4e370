"""The interface of a backend, which stores a step's tensors and runs its programs on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardweave.backends.programs import Key
from shardweave.backends.state.initial import Source
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import without_overrides

Compiler = Literal["triton", "inductor"]
"""Compilers of fused regions."""


class Runner(ABC):
    """A loaded program. It is called with this rank's shards of the program's arguments."""

    order: Sequence[Key] = ()
    """Gradients that `in_order` hands over before the end of the program, in their order."""

    @abstractmethod
    def __call__(self, given: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Run the program; returns this rank's results by kind and name. If `given` has a tensor
        under a gradient's key, the runner may add to it and return it. It may remove arguments from
        `given` after their last use."""

    def in_order(self, given: dict[Key, Tensor], results: dict[Key, Tensor]) -> Iterator[None]:
        """Run the program, and yield each time that the next gradient of `order` is complete.
        Results are put into `results`, from which the caller may remove them. Otherwise as
        `__call__`."""
        results.update(self(given))
        yield


@dataclass(frozen=True)
class Pending:
    """An unreduced gradient: each rank of some axes holds one term of a sum."""

    gradient: Tensor
    sharding: Sharding


class Backend(ABC):
    """Protocol of backends, which place tensors by their shardings and load programs. By default a
    backend keeps full, plain tensors in one process.

    device: where this rank computes. is_joint: whether each rank is a process of its own, so that
    ranks must agree on calls. adds_pending: whether programs can take unreduced gradients, add
    their own to them, and reduce the sums.
    """

    device: torch.device
    is_joint: bool = False
    adds_pending: bool = False

    @abstractmethod
    def check(self, program: Program) -> None:
        """Raises ValueError for a program that this backend does not run."""

    @abstractmethod
    def load(self, program: Program, pending: Collection[str] = ()) -> Runner:
        """Load a program. Collective. pending: names of gradients that the program adds to given
        unreduced ones (`adds_pending`)."""

    @abstractmethod
    def stored(self, tensor: Tensor | Source, sharding: Sharding, key: Key) -> Tensor:
        """Copy this rank's shard of a full tensor into the form in which a step stores it."""

    def keep_states_on_host(self, parameters: Iterable[Tensor]) -> None:
        """Keep these parameters' optimizer states on the host between updates, if the backend has a
        host beside its device."""
        del parameters

    def local(self, tensor: Tensor) -> Tensor:
        """Return a stored tensor in the form that the runner takes, sharing its memory."""
        return tensor

    def argument(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """Return an input, a full tensor or a DTensor, in the form that the runner takes."""
        del sharding
        return tensor.detach().to(self.device)

    def returned(
        self, result: Tensor, sharding: Sharding, home: int | None, shape: Sequence[int]
    ) -> Tensor:
        """Convert a runner's output to the form that a step returns; scalars are replicated.
        Collective. shape: the global shape. home: the stage that has the output, if only one
        does."""
        del sharding, home, shape
        return result

    def like(self, local: Tensor, stored: Tensor) -> Tensor:
        """Wrap this rank's shard `local`, placed as `stored`, in the form that a step keeps."""
        del stored
        return local

    def fitted(self, value: Tensor, stored: Tensor, sharding: Sharding) -> Tensor:
        """Convert `value`, full or sharded in any way, to the form of `stored`. Collective."""
        del stored, sharding
        return value

    def batch(self, local: Tensor, sharding: Sharding) -> Tensor:
        """Make the global input from this rank's shard."""
        del sharding
        return local

    def rows(self, num_rows: int, sharding: Sharding) -> Sequence[int]:
        """Return the indices of this rank's rows of an input with `num_rows` rows."""
        del sharding
        return range(num_rows)

    def gradient(self, local: Tensor, parameter: Tensor) -> Tensor:
        """Wrap this rank's shard of a gradient in the form that the parameter's `.grad` has."""
        return self.like(local, parameter)

    def take_gradient(self, parameter: Tensor) -> None:
        """Convert the `.grad` set by autograd to the form that `gradient` returns."""
        with without_overrides():
            if parameter.grad is not None:
                parameter.grad = self.gradient(parameter.grad, parameter)

    # Unreduced gradients

    def pending(self, local: Tensor, sharding: Sharding) -> Tensor:
        """Wrap an unreduced gradient for `.grad`; in a single process it is a plain tensor."""
        del sharding
        return local

    def reduced(self, gradients: Mapping[str, Pending]) -> dict[str, Tensor]:
        """Reduce unreduced gradients, by name; each sum is in memory of its own. Collective."""
        return {name: pending.gradient for name, pending in gradients.items()}

    def is_first(self, axes: Sequence[str]) -> bool:
        """True if this rank has coordinate 0 on all `axes`: it alone adds a replicated term."""
        del axes
        return True
