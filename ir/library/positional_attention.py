# pyright: basic
# torch.library is only partly typed.
"""The schemas of attention by positions: of the ops `dist.attention` and its backward.

Queries and keys come with their positions in the whole sequence, and a query sees the keys at its
own position and before. So a device's result does not depend on where its rows lie in memory. If a
device holds some of the keys only, results for several shards of keys merge by their log-sum-exp.

`pieces_of` splits attention into dense rectangles and causal triangles. The positions of a shard's
queries and keys are arithmetic progressions. If two of them have one step, query i sees the keys up
to number i + offset, which attention kernels compute without a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("shardweave", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "Tensor? query_positions=None, Tensor? key_positions=None, *, float? scale=None) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "merge_attention(Tensor out, Tensor logsumexp, Tensor other, Tensor other_logsumexp) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor? attn_mask=None, Tensor? query_positions=None, "
    "Tensor? key_positions=None, *, float? scale=None) -> (Tensor, Tensor, Tensor)"
)

ATTENTION = "dist.attention"
ATTENTION_BACKWARD = "dist.attention_backward"
MERGE_ATTENTION = "dist.merge_attention"
OPS = (ATTENTION, ATTENTION_BACKWARD, MERGE_ATTENTION)
"""The ops' names in programs."""


def logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a log-sum-exp of scores: float32 for 16-bit scores."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError("queries, keys and values must have 4 dims, and keys the shape of values")
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        raise ValueError("keys must have the queries' samples, and a divisor of their heads")
    if (query_positions is None) != (key_positions is None):
        raise ValueError("give positions for both queries and keys, or for neither")
    for positions, tensor in ((query_positions, query), (key_positions, key)):
        if positions is not None and (
            positions.shape != tensor.shape[2:3] or positions.dtype != torch.int64
        ):
            raise ValueError("positions must be 1-d int64, one for each query or key")


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
        raise ValueError("the output and its gradient must have the shape of the queries")
    if logsumexp.shape != query.shape[:3]:
        raise ValueError("logsumexp must have the shape of the queries without the last dim")
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _meta_merge(
    out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    if out.shape != other.shape or logsumexp.shape != other_logsumexp.shape:
        raise ValueError("the two partial results that are merged must have equal shapes")
    if logsumexp.shape != out.shape[:-1]:
        raise ValueError("logsumexp must have the shape of the output without the last dim")
    return torch.empty_like(out, dtype=logsumexp.dtype), torch.empty_like(logsumexp)


_LIBRARY.impl("attention", _meta, "Meta")
_LIBRARY.impl("merge_attention", _meta_merge, "Meta")
_LIBRARY.impl("attention_backward", _meta_backward, "Meta")


MAX_PIECES = 64
"""Most kernel calls for one attention. A shard needs a few; unordered positions would need one per
pair, and get a mask instead, which is cheaper from about this number on."""


@dataclass(frozen=True)
class Progression:
    """Token positions `start`, `start + step`, ..; `at`: the slice of their indices in a dim."""

    start: int
    step: int
    length: int
    at: slice

    def every(self, count: int) -> Iterator[Progression]:
        """Split into `count` progressions; each takes every `count`-th position."""
        for first in range(min(count, self.length)):
            length = (self.length - first + count - 1) // count
            yield Progression(
                self.start + first * self.step,
                self.step * count,
                length,
                _places(self.at, first, length, count),
            )

    def part(self, first: int, end: int) -> slice:
        """The tensor indices, as a slice, of the progression's positions `first` to `end` - 1."""
        return _places(self.at, first, end - first)


def _places(at: slice, first: int, length: int, count: int = 1) -> slice:
    """The slice of `length` indices of `at`: every `count`-th, from number `first` on."""
    start, step = at.start + first * at.step, at.step * count
    return slice(start, start + (length - 1) * step + 1, step)


@dataclass(frozen=True)
class Piece:
    """Queries that see all of `keys`; if `is_causal`, query i sees keys 0 to i. Both are slices."""

    queries: slice
    keys: slice
    is_causal: bool


def position_runs(positions: Sequence[int]) -> list[Progression]:
    """Split positions into arithmetic progressions: greedily, each as long as possible."""
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
    """Split causal attention into pieces; None if positions do not rise, or for too many pieces.
    Each pair of a query and a key at the query's position or before is in exactly one piece."""
    queries, keys = position_runs(query_positions), position_runs(key_positions)
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
    """Yield the pieces in which query i sees the keys up to number i + offset."""
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
