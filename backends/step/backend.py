"""A backend: where the tensors of a step are, and what runs its programs, on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
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
    """A program, ready to be run on this rank's parts of its arguments."""

    @abstractmethod
    def __call__(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The results by kind and name.

        A gradient under whose key `given` has a tensor may be added to that, and be it.
        """


@dataclass(frozen=True)
class Pending:
    """An unreduced gradient: each rank of some axes holds one term of a sum."""

    gradient: Tensor
    sharding: Sharding


class Backend(ABC):
    """Places tensors by their shardings, and loads programs.

    device: where this rank computes. is_joint: whether ranks are processes of their own, which are
    to agree. adds_pending: whether programs can add gradients to pending sums that they are given,
    and reduce both.
    """

    device: torch.device
    is_joint: bool = False
    adds_pending: bool = False

    @abstractmethod
    def check(self, program: Program) -> None:
        """Raises ValueError for a program that this backend does not run."""

    @abstractmethod
    def load(self, program: Program, pending: Collection[str] = ()) -> Runner:
        """The program, ready to run. Collective.

        pending: names of gradients whose terms are to be added to pending sums (`adds_pending`).
        """

    @abstractmethod
    def stored(self, tensor: Tensor | Source, sharding: Sharding, key: Key) -> Tensor:
        """A copy of this rank's part of a whole tensor, in the form that a step keeps."""

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """Return a stored tensor in the form that the runner takes, sharing its memory."""

    @abstractmethod
    def argument(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """Return an input in the form that the runner takes: a whole tensor, or a DTensor."""

    @abstractmethod
    def returned(
        self, result: Tensor, sharding: Sharding, home: int | None, shape: Sequence[int]
    ) -> Tensor:
        """Return a runner's output, of a global shape, as a step returns it; scalars replicated.
        Collective.

        home: the stage that has it, if only one does.
        """

    @abstractmethod
    def whole(self, tensor: Tensor, sharding: Sharding) -> Tensor:
        """A copy of a stored tensor that is whole, and plain, on every rank. Collective."""

    @abstractmethod
    def like(self, local: Tensor, stored: Tensor) -> Tensor:
        """A part of a tensor that is placed as `stored` is, in the form that a step keeps."""

    @abstractmethod
    def fitted(self, value: Tensor, stored: Tensor, sharding: Sharding) -> Tensor:
        """A given tensor, whole or in any shards, in the form of the stored one. Collective."""

    @abstractmethod
    def batch(self, local: Tensor, sharding: Sharding) -> Tensor:
        """The global input, given this rank's part."""

    @abstractmethod
    def rows(self, num_rows: int, sharding: Sharding) -> Sequence[int]:
        """The rows, of so many, that are this rank's."""

    def gradient(self, local: Tensor, parameter: Tensor) -> Tensor:
        """A rank's part of a gradient, in the form that the parameter's `.grad` has."""
        return self.like(local, parameter)

    def take_gradient(self, parameter: Tensor) -> None:
        """Bring the gradient that autograd has added into the form that `gradient` gives."""
        with without_overrides():
            if parameter.grad is not None:
                parameter.grad = self.gradient(parameter.grad, parameter)

    # Gradients that are pending sums

    def pending(self, local: Tensor, sharding: Sharding) -> Tensor:
        """The form of a gradient that is a pending sum; it is whole where one process has it."""
        del sharding
        return local

    def reduced(self, gradients: Mapping[str, Pending]) -> dict[str, Tensor]:
        """The sums of pending gradients, each in its own memory. Collective."""
        return {name: pending.gradient for name, pending in gradients.items()}

    def is_first(self, axes: Sequence[str]) -> bool:
        """Whether this rank is the one of `axes` that holds what all of them hold."""
        del axes
        return True
