"""`dist.random` on any device: a Triton kernel on a GPU, torch's ops elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.backends.triton.installed import has_triton
from shardweave.ir.library import philox


def random_numbers(
    state: Tensor,
    positions: Sequence[Tensor],
    *,
    draw: int,
    distribution: str = "uniform",
    dtype: torch.dtype,
) -> Tensor:
    """The numbers at some positions of a global tensor: see `ir.library.philox.numbers_at`."""
    if state.device.type == "cuda" and has_triton():
        from shardweave.backends.triton.kernels.philox import numbers

        return numbers(state, positions, draw=draw, distribution=distribution, dtype=dtype)
    return philox.numbers_at(state, positions, draw=draw, distribution=distribution, dtype=dtype)
