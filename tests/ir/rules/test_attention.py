"""Rules of fused attention."""

from collections.abc import Callable

import pytest
import torch

Einsum = Callable[..., str]
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
Q, K, ROW = (2, 4, 8, 6), (2, 4, 10, 6), (2, 4, 8)


def test_samples_heads_and_queries_pass(einsum: Einsum) -> None:
    text = einsum(FLASH, [Q, K, K], [Q, ROW])
    assert text == "a b c ., a b . ., a b . . -> a b c ., a b c"


@pytest.mark.parametrize(
    ("mask", "dims"),
    [
        ((8, 10), "c ."),
        ((1, 10), ". ."),
        ((2, 1, 8, 10), "a . c ."),
        ((2, 1, 1, 10), "a . . ."),
        ((1, 4, 8, 10), ". b c ."),
        ((2, 4, 8, 10), "a b c ."),
    ],
)
def test_mask_is_broadcast(einsum: Einsum, mask: tuple[int, ...], dims: str) -> None:
    text = einsum(FLASH, [Q, K, K, mask], [Q, ROW])
    assert text == f"a b c ., a b . ., a b . ., {dims} -> a b c ., a b c"


def test_queries_that_share_keys_are_cut_with_them_or_among_themselves(einsum: Einsum) -> None:
    shared = (2, 2, 10, 6)
    text = einsum(FLASH, [Q, shared, shared], [Q, ROW])
    assert text == "a (b c) d ., a b . ., a b . . -> a (b c) d ., a (b c) d"


def test_backward_has_the_dims_of_forward(einsum: Einsum) -> None:
    text = einsum(
        f"{FLASH}_backward",
        [Q, Q, K, K, Q, ROW, (2, 1, 8, 10)],
        [Q, K, K],
        dropout_p=0.0,
        is_causal=False,
    )
    q, k = "a b c .", "a b . ."
    assert text == f"{q}, {q}, {k}, {k}, {q}, a b c, a . c . -> {q}, {k}, {k}"


def test_positions_are_cut_with_their_queries(einsum: Einsum) -> None:
    rows, columns = ((8,), torch.int64), ((10,), torch.int64)
    text = einsum("dist.attention", [Q, K, K, None, rows, columns], [Q, ROW])
    assert text == "a b c ., a b . ., a b . ., c, . -> a b c ., a b c"
