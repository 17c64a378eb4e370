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

import torch
from torch import Tensor

from shardweave.backends.emit import fused_attention

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
    kind = fused_attention.kernel_for(query, key, value, is_causal, attn_mask)
    if kind != "none":
        _check_no_dropout(dropout_p)
    if kind == "flash":
        return fused_attention.flash(query, key, value, is_causal, scale)
    if kind == "efficient":
        return fused_attention.efficient(query, key, value, is_causal, attn_mask, scale)
    run = _KERNEL if query.device.type == "cpu" else plain_attention
    return run(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)


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
    kind = fused_attention.kernel_for(query, key, value, is_causal, attn_mask)
    operands, saved = (query, key, value), (out, logsumexp)
    if kind == "flash":
        return fused_attention.flash_backward(grad_out, operands, saved, is_causal, scale)
    if kind == "efficient":
        return fused_attention.efficient_backward(
            grad_out, operands, saved, is_causal, attn_mask, scale
        )
    run = _KERNEL_BACKWARD if query.device.type == "cpu" else plain_attention_backward
    return run(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
        attn_mask=attn_mask, scale=scale,
    )  # fmt: skip


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `flash_attention` with plain torch ops."""
    _check_no_dropout(dropout_p)
    scores = _scores(query, key, is_causal, attn_mask, scale)
    logsumexp = scores.logsumexp(-1)
    # A row that the mask leaves empty gives zeros, and 0 for its logsumexp.
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    output = weights @ _wide(value).unsqueeze(2)
    return output.flatten(1, 2).to(query.dtype), logsumexp.flatten(1, 2)


def plain_attention_backward(
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
    """Compute `flash_attention_backward` with plain torch ops."""
    _check_no_dropout(dropout_p)
    num_key_heads = key.shape[1]
    grad, q, o = (_grouped(x, num_key_heads) for x in (grad_out, query, out))
    scores = _scores(query, key, is_causal, attn_mask, scale)
    weights = (scores - logsumexp.unflatten(1, (num_key_heads, -1)).unsqueeze(-1)).exp()
    grad_weights = grad @ _wide(value).unsqueeze(2).mT
    grad_scores = weights * (grad_weights - (grad * o).sum(-1, keepdim=True))
    grad_scores = grad_scores * _scale(query, scale)
    grad_query = (grad_scores @ _wide(key).unsqueeze(2)).flatten(1, 2)
    grad_key = (grad_scores.mT @ q).sum(2)
    grad_value = (weights.mT @ grad).sum(2)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    """Make rows dense: the CPU's kernel reads them as dense, without an error if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _grouped(x: Tensor, num_key_heads: int) -> Tensor:
    """Reshape B x H x .. to B x K x H/K x .., in the dtype of the computation."""
    return _wide(x).unflatten(1, (num_key_heads, -1))


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention scores before the softmax: B x K x H/K x L x S."""
    num_key_heads, length, num_keys = key.shape[1], query.shape[2], key.shape[2]
    scores = _grouped(query, num_key_heads) @ _wide(key).unsqueeze(2).mT * _scale(query, scale)
    if attn_mask is not None:
        full = (query.shape[0], query.shape[1], length, num_keys)
        scores = scores + _grouped(attn_mask.expand(full), num_key_heads)
    if is_causal:
        future = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _check_no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(f"attention has dropout {dropout_p}; capture the model with dropout 0.")
