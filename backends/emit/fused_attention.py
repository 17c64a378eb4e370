"""PyTorch's fused attention on a GPU, forward and backward, for programs captured on the CPU.

Shapes and semantics equal `backends.emit.attention`. Flash attention takes 16-bit operands
without a mask; memory-efficient attention also takes float32 and masks. The caller computes
operands that neither takes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 8
"""Mask rows are padded to multiples of so many elements; head widths must be such multiples."""

_LOGSUMEXP_ALIGNED = 32
"""Memory-efficient attention pads its logsumexp to a multiple of so many queries."""


def kernel_for(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None) -> str:
    """Return the kernel that supports these operands: `flash`, `efficient`, or `none`."""
    same_width = query.shape[-1] == value.shape[-1]
    if query.device.type != "cuda" or not same_width or query.shape[-1] % _ALIGNED:
        return "none"
    square = query.shape[-2] == key.shape[-2]
    if causal and not square:
        return "none"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if is_half and mask is None and query.shape[-1] <= 256 and _has_flash(query.device):
        return "flash"
    if query.dtype == torch.float64 or (causal and mask is not None):
        return "none"
    return "efficient"


def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp."""
    returned: Any = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return returned[0], returned[1]


def flash_backward(
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor],
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value = operands
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, *saved, None, None, query.shape[-2], key.shape[-2], 0.0, causal,
        seed, torch.empty(0, device=query.device), scale=scale,
    )  # fmt: skip


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    returned: Any = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _bias(query, key, mask), True, 0.0, causal, scale=scale
    )
    logsumexp = returned[1].narrow(-1, 0, query.shape[-2])
    # A row that the mask leaves empty has 0, as in the CPU's kernel.
    return returned[0], logsumexp.masked_fill(logsumexp == -math.inf, 0.0).contiguous()


def efficient_backward(
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor],
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    query, key, value = operands
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    wide = [x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value)]
    output, logsumexp = saved
    missing = -logsumexp.shape[-1] % _LOGSUMEXP_ALIGNED
    padded = torch.nn.functional.pad(logsumexp, (0, missing), value=math.inf)
    none = torch.zeros((), dtype=torch.int64, device=query.device)  # the seed of no dropout
    gradients: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, query, *wide, _bias(query, key, mask), output, padded, none, none, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    dq, dk, dv = gradients[:3]
    if groups > 1:
        dk, dv = (x.unflatten(1, (heads, groups)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    missing = -mask.shape[-1] % _ALIGNED
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    rows = torch.nn.functional.pad(mask.to(query.dtype), (0, missing))
    return rows.narrow(-1, 0, mask.shape[-1]).expand(full)
