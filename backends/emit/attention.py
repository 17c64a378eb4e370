"""The fused attention op of programs, on any device.

A program captured on the CPU calls the CPU's flash attention, which has no kernel elsewhere. These
functions call it on the CPU, and PyTorch's fused kernels on a GPU; operands that no kernel takes
are computed with plain torch ops. Of the softmax, only the logsumexp is saved for the backward
pass.

Shapes: query B x H x L x E, key and value B x K x S x E, where K divides H and query heads
h * H/K .. share key head h; mask broadcastable to B x H x L x S, added to the scores;
output as query; logsumexp B x H x L. 16-bit inputs are computed in float32, which is also
the dtype of their logsumexp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_ALIGNED = 8
"""Mask rows are padded to multiples of so many elements; head widths must be such multiples."""

_LOGSUMEXP_ALIGNED = 32
"""Memory-efficient attention pads its logsumexp to a multiple of so many queries."""


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp), like `aten._scaled_dot_product_flash_attention_for_cpu`."""
    query, key, value = (_dense_rows(x) for x in (query, key, value))
    if query.is_cpu:
        return _KERNEL(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    _check_no_dropout(dropout_p)
    attention = AttentionCall(query, key, value, is_causal, attn_mask, scale)
    if attention.kernel == "flash":
        return attention.flash()
    return attention.efficient() if attention.kernel == "efficient" else attention.plain()


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, as the backward op of that attention does."""
    query, key, value, out = (_dense_rows(x) for x in (query, key, value, out))
    if query.is_cpu:
        return _KERNEL_BACKWARD(
            grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
            attn_mask=attn_mask, scale=scale,
        )  # fmt: skip
    _check_no_dropout(dropout_p)
    attention = AttentionCall(query, key, value, is_causal, attn_mask, scale)
    if attention.kernel == "flash":
        return attention.flash_backward(grad_out, out, logsumexp)
    if attention.kernel == "efficient":
        return attention.efficient_backward(grad_out, out, logsumexp)
    return attention.plain_backward(grad_out, out, logsumexp)


@dataclass(frozen=True)
class AttentionCall:
    """The operands and options of attention, and its computation on devices other than the CPU.

    PyTorch's flash attention takes 16-bit operands without a mask; its memory-efficient attention
    also takes float32 and masks; plain torch ops take all. saved: output and logsumexp.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    attn_mask: Tensor | None = None
    scale: float | None = None

    @property
    def kernel(self) -> str:
        """The kernel that supports these operands: `flash`, `efficient`, or `none`."""
        query, mask = self.query, self.attn_mask
        same_width = query.shape[-1] == self.value.shape[-1]
        if query.device.type != "cuda" or not same_width or query.shape[-1] % _ALIGNED:
            return "none"
        square = query.shape[-2] == self.key.shape[-2]
        if self.is_causal and not square:
            return "none"
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if is_half and mask is None and query.shape[-1] <= 256 and _has_flash(query.device):
            return "flash"
        if query.dtype == torch.float64 or (self.is_causal and mask is not None):
            return "none"
        return "efficient"

    def flash(self) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp."""
        returned: Any = torch.ops.aten._scaled_dot_product_flash_attention(
            self.query, self.key, self.value, 0.0, self.is_causal, False, scale=self.scale
        )
        return returned[0], returned[1]

    def flash_backward(self, grad: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        query, key = self.query, self.key
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, self.value, *saved, None, None, query.shape[-2], key.shape[-2], 0.0,
            self.is_causal, seed, torch.empty(0, device=query.device), scale=self.scale,
        )  # fmt: skip

    def efficient(self) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp."""
        returned: Any = torch.ops.aten._scaled_dot_product_efficient_attention(
            self.query, *self._repeated(), self._bias(), True, 0.0, self.is_causal, scale=self.scale
        )
        logsumexp = returned[1].narrow(-1, 0, self.query.shape[-2])
        # A row that the mask leaves empty has 0, as in the CPU's kernel.
        return returned[0], logsumexp.masked_fill(logsumexp == -math.inf, 0.0).contiguous()

    def efficient_backward(
        self, grad: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        missing = -logsumexp.shape[-1] % _LOGSUMEXP_ALIGNED
        padded = torch.nn.functional.pad(logsumexp, (0, missing), value=math.inf)
        none = torch.zeros((), dtype=torch.int64, device=grad.device)  # the seed of no dropout
        gradients: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, self.query, *self._repeated(), self._bias(), out, padded, none, none, 0.0,
            [True, True, True, False], self.is_causal, scale=self.scale,
        )  # fmt: skip
        dq, dk, dv = gradients[:3]
        heads = self.key.shape[1]
        if heads < self.query.shape[1]:
            dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def _repeated(self) -> list[Tensor]:
        """Key and value, with as many heads as the query."""
        groups = self.query.shape[1] // self.key.shape[1]
        both = self.key, self.value
        return [x.repeat_interleave(groups, 1) if groups > 1 else x for x in both]

    def _bias(self) -> Tensor | None:
        query, mask = self.query, self.attn_mask
        if mask is None:
            return None
        rows = torch.nn.functional.pad(mask.to(query.dtype), (0, -mask.shape[-1] % _ALIGNED))
        return rows.narrow(-1, 0, mask.shape[-1]).expand(*query.shape[:3], self.key.shape[2])

    def plain(self) -> tuple[Tensor, Tensor]:
        """Compute output and logsumexp with plain torch ops."""
        scores = self._scores()
        logsumexp = scores.logsumexp(-1)
        # A row that the mask leaves empty gives zeros, and 0 for its logsumexp.
        logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
        weights = (scores - logsumexp.unsqueeze(-1)).exp()
        output = weights @ _wide(self.value).unsqueeze(2)
        return output.flatten(1, 2).to(self.query.dtype), logsumexp.flatten(1, 2)

    def plain_backward(
        self, grad_out: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of query, key and value with plain torch ops."""
        query, key, value = self.query, self.key, self.value
        num_key_heads = key.shape[1]
        grad, q, o = (_grouped(x, num_key_heads) for x in (grad_out, query, out))
        saved = logsumexp.unflatten(1, (num_key_heads, -1)).unsqueeze(-1)
        weights = (self._scores() - saved).exp()
        grad_weights = grad @ _wide(value).unsqueeze(2).mT
        grad_scores = weights * (grad_weights - (grad * o).sum(-1, keepdim=True)) * self._scale
        grad_query = (grad_scores @ _wide(key).unsqueeze(2)).flatten(1, 2)
        grad_key = (grad_scores.mT @ q).sum(2)
        grad_value = (weights.mT @ grad).sum(2)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def _scores(self) -> Tensor:
        """Return attention scores before the softmax: B x K x H/K x L x S."""
        query, key, mask = self.query, self.key, self.attn_mask
        num_key_heads, length, num_keys = key.shape[1], query.shape[2], key.shape[2]
        scores = _grouped(query, num_key_heads) @ _wide(key).unsqueeze(2).mT * self._scale
        if mask is not None:
            full = (query.shape[0], query.shape[1], length, num_keys)
            scores = scores + _grouped(mask.expand(full), num_key_heads)
        if self.is_causal:
            future = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return scores


def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _dense_rows(x: Tensor) -> Tensor:
    """Make rows dense: the CPU's kernel reads them as dense, without an error if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """Reshape B x H x .. to B x K x H/K x .., in the dtype of the computation."""
    return _wide(x).unflatten(1, (num_key_heads, -1))


def _check_no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(f"attention has dropout {dropout_p}; capture the model with dropout 0.")
