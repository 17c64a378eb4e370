"""Rules of fused attention."""

from collections.abc import Callable

import pytest
import torch

from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_same_values, collectives, step

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
    assert text == "a b c ., a d . ., a d . . -> a b c ., a b c"


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


@pytest.mark.parametrize(("mesh", "selects"), [("tensor=4", 2), ("tensor=2", 0)])
def test_queries_cut_across_groups_select_their_keys_here(mesh: str, selects: int) -> None:
    program = step(
        f"""
        input %q : tensor<2x4x8x6xf64> [{{}}, {{"tensor"}}, {{}}, {{}}]
        input %k : tensor<2x2x8x6xf64>
        input %v : tensor<2x2x8x6xf64>
        %o, %l = {FLASH}(%q, %k, %v) : tensor<2x4x8x6xf64>, tensor<2x4x8xf64>
        output %o [{{}}, {{"tensor"}}, {{}}, {{}}]
        """,
        mesh,
    )
    local = run_passes(program, "preset:partition")
    assert not any("slice" not in line for line in collectives(local))
    assert sum(op.name == "aten.index_select" for op in local.ops) == selects
    assert_same_values(program, local)
    prove(local, against=program)
