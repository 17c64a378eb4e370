"""Models that look at values; pytest would rewrite the assertions of a test's own file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 4


def asserted(x: Tensor, ids: Tensor) -> Tensor:
    assert x.isfinite().all(), "not finite"
    assert x.abs().sum() > 0 and x.max() < 1e9, f"of {x.shape}"  # noqa: PT018 - two jumps
    assert torch.all(ids >= 0).item()
    return x


def raised(x: Tensor, ids: Tensor) -> Tensor:
    if ids.max() >= 8 or ids.min().item() < 0:
        raise ValueError(f"ids of {ids.shape}")
    if not x.isnan().any():
        x = x * 2 if x.ndim else x
    else:
        raise ValueError
    return x


def in_contexts(x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        raised(x, ids)
    try:
        if (x.abs() > 1e9).any():
            raise ValueError("too large")
    finally:
        x = x + 1
    with contextlib.suppress(KeyError):
        x = {"x": x}["x"]
    return x


class Checked(nn.Module):
    """A look at values, and a loss of them."""

    def __init__(self, look: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.look = look

    def forward(self, ids: Tensor) -> Tensor:
        x = self.look(self.linear(self.table(ids)), ids)
        return self.linear(x).square().mean()


def caught(x: Tensor, ids: Tensor) -> Tensor:
    try:
        raised(x, ids)
    except ValueError:
        x = -x
    return x


def decided(x: Tensor, ids: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    raised(x, ids)
    return -x
