"""Attention with plain torch ops, against the CPU's fused kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardweave.backends.emit.attention import (
    AttentionCall,
    flash_attention,
    flash_attention_backward,
)

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": (5, 7)},
    "mask_per_head": {"attn_mask": (2, 4, 5, 7)},
    "mask_per_sample_causal": {"attn_mask": (2, 1, 5, 7), "is_causal": True},
}


def operands(dtype: torch.dtype, key_heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    shapes = ((2, 4, 5, 8), (2, key_heads, 7, 8), (2, key_heads, 7, 8))
    query, key, value = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return query, key, value


def options(case: str, dtype: torch.dtype) -> dict[str, object]:
    """Keyword arguments of a case; a mask has an empty row."""
    given: dict[str, object] = dict(CASES[case])
    if "attn_mask" in given:
        mask = torch.randn(CASES[case]["attn_mask"]).to(dtype)
        mask[..., 2, :] = -math.inf
        mask[..., 3] = -math.inf
        given["attn_mask"] = mask
    return given


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Equal up to rounding; the kernel rounds to 16 bits between its two products."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_plain_attention_equals_the_fused_kernel(
    case: str, dtype: torch.dtype, key_heads: int
) -> None:
    query, key, value = operands(dtype, key_heads)
    given = options(case, dtype)
    output, logsumexp = AttentionCall(query, key, value, **given).plain()  # pyright: ignore[reportArgumentType]
    wanted = flash_attention(query, key, value, **given)  # pyright: ignore[reportArgumentType]
    assert_near((output, logsumexp), wanted, dtype)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_plain_gradients_equal_the_fused_kernels(
    case: str, dtype: torch.dtype, key_heads: int
) -> None:
    query, key, value = operands(dtype, key_heads)
    given = options(case, dtype)
    saved = flash_attention(query, key, value, **given)  # pyright: ignore[reportArgumentType]
    grad = torch.randn_like(saved[0])
    gradients = AttentionCall(query, key, value, **given).plain_backward(grad, *saved)  # pyright: ignore[reportArgumentType]
    is_causal = bool(given.pop("is_causal", False))
    args = (grad, query, key, value, *saved, 0.0, is_causal)
    wanted = flash_attention_backward(*args, **given)  # pyright: ignore[reportArgumentType]
    assert_near(gradients, wanted, dtype)


def test_dropout_is_refused() -> None:
    query, key, value = (x.to("meta") for x in operands(torch.float32))
    with pytest.raises(ValueError, match=r"attention has dropout 0\.1; capture"):
        flash_attention(query, key, value, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_attention_on_a_gpu_equals_the_cpu(case: str) -> None:
    query, key, value = operands(torch.float64)
    given = options(case, torch.float64)
    wanted = flash_attention(query, key, value, **given)  # pyright: ignore[reportArgumentType]
    on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
    found = flash_attention(query.cuda(), key.cuda(), value.cuda(), **on_gpu)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(tuple(part.cpu() for part in found), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_fused_attention_on_a_gpu_equals_plain_ops_there(
    case: str, dtype: torch.dtype, key_heads: int
) -> None:
    given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in options(case, dtype).items()}
    query, key, value = (
        torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).cuda() for x in operands(dtype, key_heads)
    )
    saved = flash_attention(query, key, value, **given)  # pyright: ignore[reportArgumentType]
    attention = AttentionCall(query, key, value, **given)  # pyright: ignore[reportArgumentType]
    wanted = attention.plain()
    assert_near(saved, wanted, dtype)
    is_causal = bool(given.pop("is_causal", False))
    grad = torch.randn_like(saved[0])
    args = (grad, query, key, value, *saved, 0.0, is_causal)
    found = flash_attention_backward(*args, **given)  # pyright: ignore[reportArgumentType]
    assert_near(found, attention.plain_backward(grad, *saved), dtype)
