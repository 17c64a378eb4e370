"""Hand-written Triton kernels to compare with, after Triton's tutorials 02, 03 and 05."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + col, mask=col < n_cols, other=-float("inf"))
    wide = x.to(tl.float32)
    power = tl.exp(wide - tl.max(wide, axis=0))
    tl.store(out_ptr + row * n_cols + col, power / tl.sum(power, axis=0), mask=col < n_cols)


def softmax(x: Tensor) -> Tensor:
    """Of the rows of a matrix, each in one program (tutorial 02)."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=block, num_warps=8)  # pyright: ignore[reportCallIssue]
    return out


@triton.jit
def _layer_norm(x_ptr, w_ptr, b_ptr, out_ptr, n_cols, eps, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n_cols + col, mask=col < n_cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n_cols
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + col, mask=col < n_cols, other=0.0).to(tl.float32)
        x = tl.where(col < n_cols, x - mean, 0.0)
        total += x * x
    rstd = 1 / tl.sqrt(tl.sum(total, axis=0) / n_cols + eps)
    for start in range(0, n_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + col, mask=col < n_cols)
        b = tl.load(b_ptr + col, mask=col < n_cols)
        x = tl.load(x_ptr + row * n_cols + col, mask=col < n_cols, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * n_cols + col, (x - mean) * rstd * w + b, mask=col < n_cols)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of the rows of a matrix (tutorial 05)."""
    out = torch.empty_like(x)
    block = min(65536 // x.element_size(), triton.next_power_of_2(x.shape[1]))
    warps = min(max(block // 256, 1), 8)
    grid = (x.shape[0],)
    _layer_norm[grid](
        x, weight, bias, out, x.shape[1], 1e-5, BLOCK=block,
        num_warps=warps,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out
