# pyright: basic
# ruff: noqa: ANN001, ANN202 - Triton reads the annotations of a kernel as types of its own
"""`dist.random` as a Triton kernel: `ir.library.philox.numbers_at`, one number per lane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardweave.ir.library.philox import digits_of, rows_and_last, words_of

_BLOCK = 512


@triton.jit
def _numbers(  # pyright: ignore[reportUnusedFunction]
    state,
    starts,
    last,
    out,
    draw,
    row_length,
    size,
    WORDS: tl.constexpr,
    DISTRIBUTION: tl.constexpr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = offsets < size
    position = tl.load(last + offsets % row_length, mask=is_in, other=0)
    block = tl.load(starts + offsets // row_length, mask=is_in, other=0)
    block += position // (4 // WORDS)
    place = position % (4 // WORDS)
    seed = tl.load(state)
    number = tl.load(state + 1) + draw + tl.zeros_like(block)
    a, b, c, d = tl.philox(
        seed,
        block.to(tl.uint32),
        (block >> 32).to(tl.uint32),
        number.to(tl.uint32),
        (number >> 32).to(tl.uint32),
    )
    if DISTRIBUTION == "normal":
        if WORDS == 2:
            radius = tl.where(place == 0, a, c).to(tl.float64) * 2.3283064365386963e-10
            angle = tl.where(place == 0, b, d).to(tl.float64) * 2.3283064365386963e-10
        else:
            radius = ((a.to(tl.int64) << 21) | (b >> 11).to(tl.int64)).to(tl.float64)
            angle = ((c.to(tl.int64) << 21) | (d >> 11).to(tl.int64)).to(tl.float64)
            radius *= 1.1102230246251565e-16
            angle *= 1.1102230246251565e-16
        drawn = tl.sqrt(-2 * tl.log(1 - radius)) * tl.cos(6.283185307179586 * angle)
    elif WORDS == 2:
        high = tl.where(place == 0, a, c)
        low = tl.where(place == 0, b, d)
        if DISTRIBUTION == "bits":
            drawn = ((high >> 1).to(tl.int64) << 32) | low.to(tl.int64)
        else:
            drawn = ((high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)).to(tl.float64)
            drawn *= 1.1102230246251565e-16
    else:
        word = tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d)))
        drawn = (word >> (32 - DIGITS)).to(tl.float32) * (1.0 / (1 << DIGITS))  # pyright: ignore[reportOperatorIssue]
    tl.store(out + offsets, drawn.to(out.dtype.element_ty), mask=is_in)


def numbers(
    state: Tensor,
    positions: Sequence[Tensor],
    *,
    draw: int,
    distribution: str = "uniform",
    dtype: torch.dtype,
) -> Tensor:
    """Draw as `ir.library.philox.numbers_at`; the kernel reads `state`, without a host sync."""
    device = state.device
    starts, last = rows_and_last(positions, device)
    result = torch.empty([p.numel() for p in positions], dtype=dtype, device=device)
    size = result.numel()
    if size:
        kernel: Any = _numbers
        kernel[(math.ceil(size / _BLOCK),)](
            state,
            starts,
            last.contiguous(),
            result,
            draw,
            last.numel(),
            size,
            WORDS=words_of(distribution, dtype),
            DISTRIBUTION=distribution,
            DIGITS=digits_of(dtype) if dtype.is_floating_point else 0,
            BLOCK=_BLOCK,
            enable_fp_fusion=True,  # as in `launch_options`
        )
    return result
