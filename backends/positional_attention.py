"""`dist.attention` and its backward: attention by positions, without a mask where that can be.

Queries and keys of a shard stand at positions that are runs: starts and steps. Of two runs of one
step the i-th query sees the keys up to the i-th and an offset, which is a rectangle and a triangle,
and so what attention kernels do without a mask; runs of other steps are taken apart into such.
The rectangles' and triangles' results merge by their log-sum-exp.

Shapes are those of `backends.attention`. A query that sees no key gives zeros, and -inf for its
log-sum-exp, so that it adds nothing to a merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shardweave.backends.attention import flash_attention, flash_attention_backward
from shardweave.ir.positional_attention import logsumexp_dtype

MAX_PIECES = 64
"""Calls of a kernel for one attention. Shards of the algebra need a few; positions in no order
would need one for each pair, and a mask, which these then get, is cheaper from about here on."""


@dataclass(frozen=True)
class Progression:
    """Positions `start`, `start + step`, .., which stand at the places `at` of a tensor's dim."""

    start: int
    step: int
    length: int
    at: slice

    def every(self, count: int) -> Iterator[Progression]:
        """The runs of every `count`-th of the positions."""
        for first in range(min(count, self.length)):
            length = (self.length - first + count - 1) // count
            yield Progression(
                self.start + first * self.step,
                self.step * count,
                length,
                _places(self.at, first, length, count),
            )

    def part(self, first: int, end: int) -> slice:
        """The places of the positions from one to another, by their numbers in the run."""
        return _places(self.at, first, end - first)


def _places(at: slice, first: int, length: int, count: int = 1) -> slice:
    """Of some places every `count`-th, from one on."""
    start, step = at.start + first * at.step, at.step * count
    return slice(start, start + (length - 1) * step + 1, step)


@dataclass(frozen=True)
class Piece:
    """A rectangle of queries and keys, or with `is_causal` a square of which the lower triangle."""

    queries: slice
    keys: slice
    is_causal: bool


def runs_of(positions: Sequence[int]) -> list[Progression]:
    """Rising positions as runs, each as long as can be, from the first on."""
    runs: list[Progression] = []
    begin = 0
    while begin < len(positions):
        end = begin + 1
        step = positions[end] - positions[begin] if end < len(positions) else 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        runs.append(Progression(positions[begin], step, end - begin, slice(begin, end, 1)))
        begin = end
    return runs


def pieces_of(query_positions: Sequence[int], key_positions: Sequence[int]) -> list[Piece] | None:
    """What queries see, as pieces; None if positions do not rise, or there were too many pieces.

    Each pair of a query and a key at its position or before is in exactly one piece, and no other.
    """
    queries, keys = runs_of(query_positions), runs_of(key_positions)
    if len(queries) * len(keys) > MAX_PIECES or any(run.step < 1 for run in (*queries, *keys)):
        return None
    pieces: list[Piece] = []
    for rows in queries:
        for columns in keys:
            pieces += _pieces_of_runs(rows, columns)
            if len(pieces) > MAX_PIECES:
                return None
    return pieces


def _pieces_of_runs(queries: Progression, keys: Progression) -> Iterator[Piece]:
    step = math.lcm(queries.step, keys.step)
    if step // queries.step * (step // keys.step) > MAX_PIECES:
        # Of more, only what is seen at all counts; the caller gives up.
        yield from (Piece(queries.at, keys.at, False) for _ in range(MAX_PIECES + 1))
        return
    for rows in queries.every(step // queries.step):
        for columns in keys.every(step // keys.step):
            yield from _pieces_of_equal_steps(rows, columns, (rows.start - columns.start) // step)


def _pieces_of_equal_steps(queries: Progression, keys: Progression, offset: int) -> Iterator[Piece]:
    """Query i sees the keys up to number i + offset."""
    num_queries, num_keys = queries.length, keys.length
    first = max(0, -offset)  # the first query that sees any
    if first >= num_queries:
        return
    shared = min(first + offset, num_keys)  # keys that all from `first` on see
    if shared:
        yield Piece(queries.part(first, num_queries), keys.part(0, shared), False)
    # The last query of the square sees the last key of it; later queries see all keys.
    end = max(first, min(num_queries, num_keys - offset))
    if end > first:
        yield Piece(queries.part(first, end), keys.part(shared, end + offset), True)
    if end < num_queries and shared < num_keys:
        yield Piece(queries.part(end, num_queries), keys.part(shared, num_keys), False)


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
    """(output, logsumexp) of queries that see the keys at their positions and before.

    Without positions they see all keys. attn_mask: is added to the scores.
    """
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
        merged = torch.logaddexp(before, own)
        total.mul_((before - merged).exp_().unsqueeze(-1))
        total.add_((own - merged).exp_().unsqueeze(-1) * part)
        before.copy_(merged)
    return out.to(query.dtype), rows


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
    """Gradients of query, key and value.

    out, logsumexp: of all keys of the queries, of which these may be a part; the gradient of the
    queries is then that of the part.
    """
    # Of a query that sees nothing all weights are 0, whatever finite number stands here.
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    pieces = _pieces(attn_mask, query_positions, key_positions)
    if pieces is None:
        mask = _whole_mask(query, attn_mask, query_positions, key_positions)
        return flash_attention_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, False, attn_mask=mask, scale=scale
        )
    dtype = logsumexp_dtype(query.dtype)
    found = tuple(_like(x, dtype) for x in (query, key, value))
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
        for total, place, part in zip(found, places, gradients, strict=True):
            total[:, :, place].add_(part)
    dq, dk, dv = (total.to(query.dtype) for total in found)
    return dq, dk, dv


def _pieces(
    attn_mask: Tensor | None, query_positions: Tensor | None, key_positions: Tensor | None
) -> list[Piece] | None:
    """The pieces to compute; None where a mask says what queries see.

    For positions on a GPU too: looking at them would wait for all that is on its way. Steps give
    those that they can count on the host.
    """
    if query_positions is None or key_positions is None or attn_mask is not None:
        return None
    if query_positions.device.type != "cpu" or key_positions.device.type != "cpu":
        return None
    return _pieces_of_bytes(*(x.numpy().tobytes() for x in (query_positions, key_positions)))


@lru_cache(maxsize=16)
def _pieces_of_bytes(queries: bytes, keys: bytes) -> list[Piece] | None:
    """The pieces of int64 positions, which each layer of a model asks for."""
    rows, columns = (np.frombuffer(x, dtype=np.int64).tolist() for x in (queries, keys))
    return pieces_of(rows, columns)


def _whole_mask(
    query: Tensor,
    attn_mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> Tensor | None:
    """The mask with -inf for keys behind their query's position."""
    if query_positions is None or key_positions is None:
        return attn_mask
    rows, columns = (x.to(query.device) for x in (query_positions, key_positions))
    is_behind = columns > rows.unsqueeze(-1)
    mask = query.new_zeros(()) if attn_mask is None else attn_mask
    return torch.where(is_behind, -math.inf, mask)


def _empty_rows(logsumexp: Tensor, mask: Tensor | None) -> Tensor:
    """-inf for queries that the mask leaves no key; kernels give 0."""
    if mask is None:
        return logsumexp
    return logsumexp.masked_fill((mask == -math.inf).all(-1), -math.inf)


def _is_whole(piece: Piece, query: Tensor, key: Tensor) -> bool:
    sizes = zip((piece.queries, piece.keys), (query.shape[2], key.shape[2]), strict=True)
    return all(len(range(*place.indices(size))) == size for place, size in sizes)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of a tensor's shape, with heads last but one in memory, as kernels give results."""
    samples, heads, length, width = x.shape
    return x.new_zeros((samples, length, heads, width), dtype=dtype).transpose(1, 2)


_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.impl("attention", positional_attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", positional_attention_backward, "CompositeExplicitAutograd")
