# pyright: basic
# torch.library is only partly typed.
"""The schemas of attention by positions: of the ops `dist.attention` and its backward.

Queries and keys come with their positions in the whole sequence, and a query sees the keys at its
own position and before. So what a device computes does not depend on where its rows lie in memory,
nor on which part of the keys it holds; results of several parts merge by their log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "Tensor? query_positions=None, Tensor? key_positions=None, *, float? scale=None) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor? attn_mask=None, Tensor? query_positions=None, "
    "Tensor? key_positions=None, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)

ATTENTION = "dist.attention"
ATTENTION_BACKWARD = "dist.attention_backward"
"""The ops' names in programs."""


def logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the log-sum-exp of scores in a dtype: 16-bit ones are computed in float32."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError("queries have 4 dims, and keys and values too, of one shape")
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        raise ValueError("keys have the samples of queries, and a number of heads that divides")
    if (query_positions is None) != (key_positions is None):
        raise ValueError("positions are given of both queries and keys, or of neither")
    for positions, tensor in ((query_positions, query), (key_positions, key)):
        if positions is not None and (
            positions.shape != tensor.shape[2:3] or positions.dtype != torch.int64
        ):
            raise ValueError("positions have to be int64, one for each query or key")


def _meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    del attn_mask, scale
    _check(query, key, value, query_positions, key_positions)
    rows = query.new_empty(query.shape[:3], dtype=logsumexp_dtype(query.dtype))
    return torch.empty_like(query), rows


def _meta_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    del attn_mask, scale
    _check(query, key, value, query_positions, key_positions)
    if grad_out.shape != query.shape or out.shape != query.shape:
        raise ValueError("the output and its gradient have the shape of the queries")
    if logsumexp.shape != query.shape[:3]:
        raise ValueError("there is one logsumexp for each query of each head")
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_LIBRARY.impl("attention", _meta, "Meta")
_LIBRARY.impl("attention_backward", _meta_backward, "Meta")
