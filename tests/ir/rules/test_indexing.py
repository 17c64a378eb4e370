"""Rules of table lookups: what the index's dims give, and where the table can be cut."""

from collections.abc import Callable

import pytest
import torch

from shardweave.ir.sharding.rules import Rule

Einsum = Callable[..., str]
MakeRule = Callable[..., Rule]


def ids(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    """The type of an index of this shape."""
    return shape, torch.int64


def test_rows_of_an_embedding_reduce(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.embedding", [(12, 6), ids(2, 4)], [(2, 4, 6)]
    assert einsum(*args) == "a b, c d -> c d b"
    rows = make_rule(*args).factors[0]
    assert (rows.size, rows.reduction, rows.contiguous) == (12, "sum", True)


def test_embedding_backward_reduces_over_the_index(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.embedding_dense_backward", [(2, 4, 6), ids(2, 4)], [(12, 6)]
    values = {"padding_idx": -1, "scale_grad_by_freq": False}
    assert einsum(*args, **values) == "c d b, c d -> a b"
    assert make_rule(*args, **values).factors[0].contiguous


def test_embedding_backward_that_counts_rows_needs_the_index_whole(einsum: Einsum) -> None:
    args = "aten.embedding_dense_backward", [(2, 4, 6), ids(2, 4)], [(12, 6)]
    text = einsum(*args, padding_idx=-1, scale_grad_by_freq=True)
    assert text == ". . a, . . -> . a"


def test_gather_reduces_over_the_looked_up_dim(einsum: Einsum, make_rule: MakeRule) -> None:
    args = "aten.gather", [(4, 12), ids(4, 3)], [(4, 3)]
    assert einsum(*args, dim=-1) == "c a, c b -> c b"
    assert make_rule(*args, dim=-1).factors[0].reduction == "sum"


def test_gather_of_booleans_does_not_reduce(make_rule: MakeRule) -> None:
    boolean = torch.bool
    args = "aten.gather", [((4, 12), boolean), ids(4, 3)], [((4, 3), boolean)]
    assert make_rule(*args, dim=1).factors[0].reduction is None


def test_gather_with_a_shorter_index_needs_that_dim_whole(einsum: Einsum) -> None:
    assert einsum("aten.gather", [(4, 12), ids(2, 3)], [(2, 3)], dim=1) == ". a, . b -> . b"


@pytest.mark.parametrize(
    ("name", "text"),
    [("aten.scatter_add", "c a, c b, c b -> c a"), ("aten.scatter.src", "b a, b ., b . -> b a")],
)
def test_scatter_cuts_the_dim_it_writes_to_and_entries_that_add_up(
    einsum: Einsum, make_rule: MakeRule, name: str, text: str
) -> None:
    args = name, [(4, 12), ids(4, 3), (4, 3)], [(4, 12)]
    assert einsum(*args, dim=1) == text
    assert make_rule(*args, dim=1).factors[0].contiguous


def test_scatter_of_a_value_has_no_source(einsum: Einsum) -> None:
    text = einsum("aten.scatter.value", [(4, 12), ids(4, 1)], [(4, 12)], dim=1, value=-1.0)
    assert text == "b a, b . -> b a"


def test_scatter_from_a_longer_source_needs_that_dim_whole(einsum: Einsum) -> None:
    text = einsum("aten.scatter_add", [(4, 12), ids(4, 3), (5, 3)], [(4, 12)], dim=1)
    assert text == ". a, . ., . . -> . a"


def test_index_select_passes_other_dims(einsum: Einsum) -> None:
    assert einsum("aten.index_select", [(4, 12), ids(3)], [(4, 3)], dim=1) == "b ., a -> b a"


@pytest.mark.parametrize(
    ("indices", "result", "text"),
    [
        ([ids(3)], (3, 5, 6), ". a b, c -> c a b"),
        ([None, ids(3), ids(3)], (4, 3), "a . ., b, b -> a b"),
        ([None, ids(3)], (4, 3, 6), "a . b, c -> a c b"),
        ([ids(3), None, ids(3)], (3, 5), ". a ., b, b -> b a"),
        ([ids(7, 1), ids(1, 3)], (7, 3, 6), ". . a, b ., . c -> b c a"),
        ([ids()], (5, 6), ". a b,  -> a b"),
    ],
)
def test_indices_broadcast_and_stand_where_numpy_puts_them(
    einsum: Einsum, indices: list[object], result: tuple[int, ...], text: str
) -> None:
    assert einsum("aten.index.Tensor", [(4, 5, 6), indices], [result]) == text


def test_mask_among_indices_replicates(einsum: Einsum) -> None:
    text = einsum("aten.index.Tensor", [(4, 5), [((4,), torch.bool)]], [(3, 5)])
    assert text == ". ., . -> . ."


def test_index_put_passes_dims_that_it_does_not_index(einsum: Einsum) -> None:
    args = "aten.index_put", [(4, 5, 6), [None, ids(3)], (4, 3, 6)], [(4, 5, 6)]
    assert einsum(*args, accumulate=True) == "a . b, ., a . b -> a . b"
    text = einsum("aten.index_put", [(4, 5, 6), [None, ids(3)], ()], [(4, 5, 6)])
    assert text == "a . b, .,  -> a . b"
