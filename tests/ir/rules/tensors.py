"""Random tensors for samples: the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from shardweave.ir.library.philox import positions_of

_GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    """Normal in float64."""
    return torch.randn(shape, dtype=torch.float64, generator=_GENERATOR)


def unit(*shape: int) -> Tensor:
    """Uniform between 0.05 and 0.95."""
    return 0.05 + 0.9 * torch.rand(shape, dtype=torch.float64, generator=_GENERATOR)


def above_one(*shape: int) -> Tensor:
    """Uniform between 1.1 and 3.1."""
    return 1.1 + 2 * torch.rand(shape, dtype=torch.float64, generator=_GENERATOR)


def integers(*shape: int, high: int = 8) -> Tensor:
    """Uniform whole numbers in [0, high) in int64."""
    return torch.randint(high, shape, generator=_GENERATOR)


def positions(*shape: int) -> list[Tensor]:
    """For each dim the positions of its elements in the global tensor, as `dist.random` takes them."""
    return positions_of(shape, "uniform", torch.float32)


def booleans(*shape: int) -> Tensor:
    """Fair coins."""
    return torch.rand(shape, generator=_GENERATOR) < 0.5


def permutation(size: int) -> Tensor:
    """The numbers below `size` in random order."""
    return torch.randperm(size, generator=_GENERATOR)
