"""`dist.attention`: what its pieces cover, and its values beside a softmax over all scores."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

from shardweave.backends.emit import positional_attention as module
from shardweave.backends.emit.positional_attention import (
    positional_attention,
    positional_attention_backward,
)
from shardweave.ir.library.positional_attention import MAX_PIECES, Piece, pieces_of, position_runs

RUN = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 6))
"""Start, step and length of a run of positions."""


def positions_of_run(run: tuple[int, int, int]) -> list[int]:
    start, step, length = run
    return list(range(start, start + step * length, step))


def covered(pieces: list[Piece], num_queries: int, num_keys: int) -> Tensor:
    """How often each pair of a query and a key is in a piece."""
    counts = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for piece in pieces:
        part = counts[piece.queries, piece.keys]
        assert not piece.is_causal or part.shape[0] == part.shape[1]
        part += torch.ones_like(part).tril() if piece.is_causal else 1
    return counts


@given(RUN, RUN)
def test_pieces_of_runs_have_what_queries_see_once(
    rows: tuple[int, int, int], columns: tuple[int, int, int]
) -> None:
    queries, keys = positions_of_run(rows), positions_of_run(columns)
    pieces = pieces_of(queries, keys)
    assert pieces is not None
    seen = torch.tensor(queries)[:, None] >= torch.tensor(keys)
    assert torch.equal(covered(pieces, len(queries), len(keys)), seen.long())


@given(st.lists(st.integers(0, 12), min_size=1, unique=True), st.data())
def test_pieces_of_rising_positions_have_what_queries_see_once(
    queries: list[int], data: st.DataObject
) -> None:
    queries.sort()
    keys = sorted(data.draw(st.lists(st.integers(0, 12), min_size=1, unique=True)))
    pieces = pieces_of(queries, keys)
    if pieces is None:
        assert len(position_runs(queries)) * len(position_runs(keys)) > 1
        return
    assert len(pieces) <= MAX_PIECES
    seen = torch.tensor(queries)[:, None] >= torch.tensor(keys)
    assert torch.equal(covered(pieces, len(queries), len(keys)), seen.long())


def test_the_rows_of_a_stripe_and_of_a_plain_shard_need_few_pieces() -> None:
    stripe = pieces_of(range(3, 64, 4), range(64))
    assert stripe is not None
    assert [piece.is_causal for piece in stripe] == [True] * 4
    assert pieces_of(range(16, 32), range(64)) == [
        Piece(slice(0, 16, 1), slice(0, 16, 1), False),
        Piece(slice(0, 16, 1), slice(16, 32, 1), True),
    ]


def test_a_shard_before_all_keys_has_no_piece() -> None:
    assert pieces_of(range(4), range(4, 8)) == []


SAMPLES, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 6


def normal(heads: int, length: int) -> Tensor:
    return torch.randn(SAMPLES, heads, length, WIDTH, dtype=torch.float64, requires_grad=True)


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, behind: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by a softmax over all scores; zeros for a query that sees nothing."""
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(WIDTH) + (0 if mask is None else mask)
    scores = scores.masked_fill(behind, -math.inf)
    is_empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
    rows = scores.detach().logsumexp(-1)
    return weights @ value, rows


CASES = {
    "plain shard": (range(8, 16), range(16)),
    "stripe": (range(1, 16, 2), range(16)),
    "two blocks": ([0, 1, 2, 3, 8, 9, 10, 11], range(16)),
    "stripe and a part of the keys": (range(1, 16, 4), range(4, 8)),
    "out of order": ([5, 1, 9], [3, 2, 8]),
}


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_a_softmax(case: str, has_mask: bool) -> None:
    rows, columns = (torch.tensor(list(positions)) for positions in CASES[case])
    query, key, value = (
        normal(heads, len(positions))
        for heads, positions in ((HEADS, rows), (KEY_HEADS, columns), (KEY_HEADS, columns))
    )
    mask = None
    if has_mask:
        mask = torch.randn(SAMPLES, 1, len(rows), len(columns), dtype=torch.float64)
        mask[0, :, 1] = -math.inf
    behind = columns > rows[:, None]
    out, total = reference(query, key, value, mask, behind)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [query, key, value], grad)
    query, key, value = tree_map(Tensor.detach, (query, key, value))
    found = positional_attention(query, key, value, mask, rows, columns)
    torch.testing.assert_close(found, (out, total), rtol=1e-12, atol=1e-12)
    gradients = positional_attention_backward(grad, query, key, value, *found, mask, rows, columns)
    torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_of_parts_by_the_logsumexp_of_all_add_up() -> None:
    rows, columns = torch.arange(1, 16, 2), torch.arange(16)
    query, key, value = (normal(h, n).detach() for h, n in ((4, 8), (2, 16), (2, 16)))
    grad = torch.randn_like(query)
    found = positional_attention(query, key, value, None, rows, columns)
    whole = positional_attention_backward(grad, query, key, value, *found, None, rows, columns)
    parts = [
        positional_attention_backward(
            grad, query, key[:, :, part], value[:, :, part], *found, None, rows, columns[part]
        )
        for part in (slice(0, 8), slice(8, 16))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], 2), whole[index])


def test_sixteen_bits_are_merged_in_float32() -> None:
    query, key, value = (normal(h, n).detach().bfloat16() for h, n in ((4, 8), (2, 16), (2, 16)))
    rows, columns = torch.arange(1, 16, 2), torch.arange(16)
    out, total = positional_attention(query, key, value, None, rows, columns)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    wide = positional_attention(query.float(), key.float(), value.float(), None, rows, columns)
    torch.testing.assert_close(out.float(), wide[0], rtol=2e-2, atol=2e-2)


def test_positions_on_the_host_make_no_mask_for_queries_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, whose kernels take no mask; the device of shapes alone stands for it here."""
    calls: list[tuple[int, int, bool]] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        assert options.get("attn_mask") is None
        calls.append((query.shape[2], key.shape[2], options["is_causal"]))
        return query, query[..., 0].float()

    monkeypatch.setattr(module, "flash_attention", kernel)
    query, key = (torch.empty(1, 2, n, 8, device="meta") for n in (8, 32))
    rows, columns = torch.arange(1, 32, 4), torch.arange(32)
    positional_attention(query, key, key, None, rows, columns)
    # Position 1 + 4 i sees of each fourth key the first i + 1 where these begin at 0 and 1, else i.
    assert calls == [(8, 8, True)] * 2 + [(7, 7, True)] * 2
    calls.clear()
    with pytest.raises(AssertionError):
        positional_attention(query, key, key, None, rows.to("meta"), columns.to("meta"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_positions": None}, "for both queries and keys"),
        ({"query_positions": torch.arange(3)}, "one for each query"),
    ],
)
def test_positions_that_do_not_fit_are_refused(
    change: dict[str, Tensor | None], message: str
) -> None:
    x = torch.empty(2, 4, 8, 6, device="meta")
    given = {"query_positions": torch.arange(8), "key_positions": torch.arange(8)} | change
    with pytest.raises(ValueError, match=message):
        torch.ops.shardweave.attention(x, x, x, None, **given)
