"""Floating-point numbers as whole ones in the same order, with NaN above all.

Of these any backend of torch.distributed finds the maximum that `torch.amax` finds. Of the numbers
themselves gloo loses a NaN that is not on the first rank, since nothing is larger than it, nor it
than anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_ordered_integers(x: Tensor) -> Tensor:
    """Whole numbers, of the same shape, that compare as the floating-point ones do.

    Their negative numbers are counted from the end, as their bits are those of a magnitude.
    """
    wide = x if x.dtype == torch.float64 else x.float()  # backends know no whole numbers of 16 bits
    dtype = torch.int64 if x.dtype == torch.float64 else torch.int32
    numbers = _turned(wide.contiguous().view(dtype))
    return numbers.masked_fill_(wide.isnan(), torch.iinfo(dtype).max)


def from_ordered_integers(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `as_ordered_integers`, for numbers of a dtype."""
    wide = torch.float64 if numbers.dtype == torch.int64 else torch.float32
    return _turned(numbers).view(wide).to(dtype)


def _turned(bits: Tensor) -> Tensor:
    """All bits of negative numbers but that of the sign turned over; its own inverse."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
