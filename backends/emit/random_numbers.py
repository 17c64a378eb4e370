"""`dist.random` on any device: a Triton kernel on a GPU, torch's ops elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from shardweave.ir.library import philox

_HAS_TRITON = find_spec("triton") is not None


def random_numbers(
    state: Tensor,
    positions: Sequence[Tensor],
    *,
    draw: int,
    distribution: str = "uniform",
    dtype: torch.dtype,
) -> Tensor:
    """The numbers at some positions of a global tensor: see `ir.library.philox.random_numbers`."""
    if state.device.type == "cuda" and _HAS_TRITON:
        from shardweave.backends.triton.kernels.philox import numbers

        return numbers(state, positions, draw=draw, distribution=distribution, dtype=dtype)
    return philox.random_numbers(
        state, positions, draw=draw, distribution=distribution, dtype=dtype
    )
