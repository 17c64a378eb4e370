"""`dist.attention` and its backward: causal attention by positions, without a mask if possible.

The pairs of queries and keys that count are split into rectangles and triangles
(`ir/library/positional_attention.py`), and their results are merged by log-sum-exp.

Shapes are those of `backends.emit.attention`. A query that sees no key gives zeros, and -inf for
its log-sum-exp, so that it adds nothing to a merge.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shardweave.backends.emit.attention import flash_attention, flash_attention_backward
from shardweave.ir.library.positional_attention import Piece, logsumexp_dtype, pieces_of


def positional_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output, logsumexp) of attention to the keys at or before each query's position.
    Without positions, queries see all keys. attn_mask: added to the scores."""
    pieces = _pieces(attn_mask, query_positions, key_positions)
    if pieces is None:
        mask = _whole_mask(query, attn_mask, query_positions, key_positions)
        out, rows = flash_attention(query, key, value, attn_mask=mask, scale=scale)
        return out, _empty_rows(rows, mask)
    if len(pieces) == 1 and _is_whole(pieces[0], query, key):
        return flash_attention(query, key, value, 0.0, pieces[0].is_causal, scale=scale)
    dtype = logsumexp_dtype(query.dtype)
    out = _like(query, dtype)
    rows = query.new_full(query.shape[:3], -math.inf, dtype=dtype)
    for piece in pieces:
        part, own = flash_attention(
            query[:, :, piece.queries],
            key[:, :, piece.keys],
            value[:, :, piece.keys],
            is_causal=piece.is_causal,
            scale=scale,
        )
        before, total = rows[:, :, piece.queries], out[:, :, piece.queries]
        merged, both = merge_attention(total, before, part, own)
        total.copy_(merged)
        before.copy_(both)
    return out.to(query.dtype), rows


def merge_attention(
    out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys; return (output, logsumexp) over both.

    The weight of the second set is exp(other - log(exp(logsumexp) + exp(other))) = sigmoid(other -
    logsumexp). A query that sees no key of a set has logsumexp -inf there; if it sees none of
    either, its output is zeros for any weight.
    """
    ahead = torch.nan_to_num(other_logsumexp - logsumexp, nan=0.0)
    share, dtype = torch.sigmoid(ahead).unsqueeze(-1), logsumexp.dtype
    merged = torch.lerp(out.to(dtype), other.to(dtype), share)
    return merged, torch.logaddexp(logsumexp, other_logsumexp)


def positional_attention_backward(
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
    """Compute the gradients of query, key and value. out, logsumexp: results of attention to all
    keys of the model. `key` may be a block of these; the result for the queries is then the block's
    term of their gradient."""
    # All weights of a query that sees no key are 0, whatever finite number replaces -inf.
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    pieces = _pieces(attn_mask, query_positions, key_positions)
    if pieces is None:
        mask = _whole_mask(query, attn_mask, query_positions, key_positions)
        return flash_attention_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, False, attn_mask=mask, scale=scale
        )
    dtype = logsumexp_dtype(query.dtype)
    totals = tuple(_like(x, dtype) for x in (query, key, value))
    for piece in pieces:
        gradients = flash_attention_backward(
            grad_out[:, :, piece.queries],
            query[:, :, piece.queries],
            key[:, :, piece.keys],
            value[:, :, piece.keys],
            out[:, :, piece.queries].contiguous(),
            logsumexp[:, :, piece.queries].contiguous(),
            0.0,
            piece.is_causal,
            scale=scale,
        )
        places = (piece.queries, piece.keys, piece.keys)
        for total, place, part in zip(totals, places, gradients, strict=True):
            total[:, :, place].add_(part)
    dq, dk, dv = (total.to(query.dtype) for total in totals)
    return dq, dk, dv


def _pieces(
    attn_mask: Tensor | None, query_positions: Tensor | None, key_positions: Tensor | None
) -> list[Piece] | None:
    """Split the work into pieces without a mask; None if a mask is needed. Also None for positions
    on a GPU, since reading them would wait for its queued work. Steps pass positions on the host if
    they can compute them there."""
    if query_positions is None or key_positions is None or attn_mask is not None:
        return None
    if query_positions.device.type != "cpu" or key_positions.device.type != "cpu":
        return None
    return _pieces_of_bytes(*(x.numpy().tobytes() for x in (query_positions, key_positions)))


@lru_cache(maxsize=16)
def _pieces_of_bytes(queries: bytes, keys: bytes) -> list[Piece] | None:
    """Split by int64 positions; cached, since each layer of a model asks for the same."""
    rows, columns = (np.frombuffer(x, dtype=np.int64).tolist() for x in (queries, keys))
    return pieces_of(rows, columns)


def _whole_mask(
    query: Tensor,
    attn_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> Tensor | None:
    if query_positions is None or key_positions is None:
        return attn_mask
    rows, columns = (x.to(query.device) for x in (query_positions, key_positions))
    is_behind = columns > rows.unsqueeze(-1)
    mask = query.new_zeros(()) if attn_mask is None else attn_mask
    return torch.where(is_behind, -math.inf, mask)


def _empty_rows(logsumexp: Tensor, mask: Tensor | None) -> Tensor:
    """Set the logsumexp of queries that the mask leaves no key to -inf; kernels give 0."""
    if mask is None:
        return logsumexp
    return logsumexp.masked_fill((mask == -math.inf).all(-1), -math.inf)


def _is_whole(piece: Piece, query: Tensor, key: Tensor) -> bool:
    sizes = zip((piece.queries, piece.keys), (query.shape[2], key.shape[2]), strict=True)
    return all(len(range(*place.indices(size))) == size for place, size in sizes)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of a tensor's shape, in memory by sample, position, head, as kernels return them."""
    samples, heads, length, width = x.shape
    return x.new_zeros((samples, length, heads, width), dtype=dtype).transpose(1, 2)


_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.impl("attention", positional_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("merge_attention", merge_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", positional_attention_backward, "CompositeExplicitAutograd")
