"""Regions of every family of kernels, in sizes to choose, and how to run one both ways.

In the texts R, C and K are sizes and T is the dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardweave.backends.triton.kernels.loops import ReductionTemplate
from shardweave.backends.triton.launch.launch import FusedCall, Launch, run_on_aten
from shardweave.backends.triton.source.region import region_of
from shardweave.backends.triton.source.source import Config, Kernel
from shardweave.ir.dialects.kernel import FusedOp, fuse
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.strides import expected_strides
from shardweave.ir.program.iteration_space import WHOLE_ROW
from shardweave.tests.ir_text import step

POINTWISE = {
    "bias, gelu and residual": """
        input %x : tensor<RxCxT>
        input %b : tensor<CxT>
        input %y : tensor<RxCxT>
        %s = aten.add.Tensor(%x, %b) : tensor<RxCxT>
        %g = aten.gelu(%s, approximate = "tanh") : tensor<RxCxT>
        %r = aten.add.Tensor(%y, %g) : tensor<RxCxT>
        output %r
        grad g = %g
    """,
    "gelu backward through a transposed view": """
        input %g : tensor<CxRxT>
        input %x : tensor<RxCxT>
        %p = aten.permute(%g, dims = [1, 0]) : tensor<RxCxT>
        %y = aten.gelu_backward(%p, %x) : tensor<RxCxT>
        %v = aten.view(%y) : tensor<RCxT>
        %s = aten.silu(%v) : tensor<RCxT>
        output %s
    """,
    "halves swapped, as rotary embeddings do": """
        input %x : tensor<RxEC2xT>
        input %c : tensor<EC2xT>
        %a = aten.slice.Tensor(%x, dim = 1, start = 0) : tensor<RxCxT>
        %b = aten.slice.Tensor(%x, dim = 1, start = C) : tensor<RxCxT>
        %n = aten.neg(%b) : tensor<RxCxT>
        %k = aten.cat([%n, %a], dim = 1) : tensor<RxEC2xT>
        %m = aten.mul.Tensor(%k, %c) : tensor<RxEC2xT>
        output %m
    """,
    "gradient of a slice": """
        input %g : tensor<RxCxT>
        input %x : tensor<RxEC2xT>
        %a = aten.slice_backward(%g, dim = 1, start = C, step = 1) : tensor<RxEC2xT>
        %b = aten.slice_backward(%g, dim = 1, start = 0, step = 1) : tensor<RxEC2xT>
        %s = aten.sub.Tensor(%a, %b) : tensor<RxEC2xT>
        %m = aten.mul.Tensor(%s, %x) : tensor<RxEC2xT>
        output %m
    """,
    "gradient of cross-entropy": """
        input %l : tensor<RxCxT>
        input %i : tensor<Rx1xi64>
        input %d : tensor<T>
        %ok = aten.ne.Scalar(%i, other = -100) : tensor<Rx1xi1>
        %zero = aten.full(fill_value = 0.0) : tensor<T>
        %w = aten.where.self(%ok, %d, %zero) : tensor<Rx1xT>
        %zeros = aten.full(fill_value = 0.0) : tensor<RxCxT>
        %s = aten.scatter_add(%zeros, %i, %w, dim = 1) : tensor<RxCxT>
        %e = aten.exp(%l) : tensor<RxCxT>
        %m = aten.mul.Tensor(%e, %w) : tensor<RxCxT>
        %r = aten.sub.Tensor(%s, %m) : tensor<RxCxT>
        output %r
    """,
}

ROWS = {
    "residual and layer norm": """
        input %x : tensor<RxCxT>
        input %y : tensor<RxCxT>
        input %w : tensor<CxT>
        input %b : tensor<CxT>
        %s = aten.add.Tensor(%x, %y) : tensor<RxCxT>
        %n, %mean, %rstd = aten.native_layer_norm(%s, %w, %b, eps = 1.0e-05) : tensor<RxCxT>, tensor<Rx1xS>, tensor<Rx1xS>
        output %n
        grad s = %s
        grad m = %mean
        grad r = %rstd
    """,
    "RMS norm": """
        input %x : tensor<RxCxT>
        input %w : tensor<CxT>
        %p = aten.pow.Tensor_Scalar(%x, exponent = 2) : tensor<RxCxT>
        %s = aten.sum.dim_IntList(%p, dim = [1], keepdim = true) : tensor<Rx1xT>
        %d = aten.div.Scalar(%s, other = C) : tensor<Rx1xT>
        %e = aten.add.Scalar(%d, other = 0.001) : tensor<Rx1xT>
        %r = aten.rsqrt(%e) : tensor<Rx1xT>
        %n = aten.mul.Tensor(%x, %r) : tensor<RxCxT>
        %m = aten.mul.Tensor(%w, %n) : tensor<RxCxT>
        output %m
        grad r = %r
    """,
    "softmax and its gradient": """
        input %x : tensor<RxCxT>
        input %g : tensor<RxCxT>
        %y = aten._softmax(%x, dim = 1, half_to_float = false) : tensor<RxCxT>
        %d = aten._softmax_backward_data(%g, %y, dim = 1, input_dtype = U) : tensor<RxCxT>
        output %d
        grad y = %y
    """,
    "cross-entropy": """
        input %x : tensor<RxCxT>
        input %i : tensor<Rx1xi64>
        %a = aten.amax(%x, dim = [1], keepdim = true) : tensor<Rx1xT>
        %s = aten.sub.Tensor(%x, %a) : tensor<RxCxT>
        %e = aten.exp(%s) : tensor<RxCxT>
        %t = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<Rx1xT>
        %l = aten.log(%t) : tensor<Rx1xT>
        %p = aten.sub.Tensor(%s, %l) : tensor<RxCxT>
        %g = aten.gather(%p, %i, dim = 1) : tensor<Rx1xT>
        %n = aten.neg(%g) : tensor<Rx1xT>
        output %n
        grad p = %p
    """,
    "cross-entropy on a shard of the vocabulary": """
        input %x : tensor<RxCxT>
        input %a : tensor<Rx1xT>
        input %i : tensor<Rx1xi64>
        %s = aten.sub.Tensor(%x, %a) : tensor<RxCxT>
        %e = aten.exp(%s) : tensor<RxCxT>
        %t = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<Rx1xT>
        %out = aten.ge.Scalar(%i, other = 1) : tensor<Rx1xi1>
        %in = aten.masked_fill.Scalar(%i, %out, value = 0) : tensor<Rx1xi64>
        %g = aten.gather(%s, %in, dim = 1) : tensor<Rx1xT>
        %m = aten.masked_fill.Scalar(%g, %out, value = 0) : tensor<Rx1xT>
        output %t
        grad m = %m
    """,
}

ROWS_AND_COLUMNS = {
    "gradient of layer norm, and of the residual's bias": """
        input %g : tensor<RxCxT>
        input %x : tensor<RxCxT>
        input %mean : tensor<Rx1xS>
        input %rstd : tensor<Rx1xS>
        input %w : tensor<CxT>
        input %b : tensor<CxT>
        input %y : tensor<RxCxT>
        %d, %dw, %db = aten.native_layer_norm_backward(%g, %x, %mean, %rstd, %w, %b, output_mask = [true, true, true]) : tensor<RxCxT>, tensor<CxT>, tensor<CxT>
        %s = aten.add.Tensor(%d, %y) : tensor<RxCxT>
        %c = aten.sum.dim_IntList(%s, dim = [0], keepdim = true) : tensor<1xCxT>
        output %s
        grad w = %dw
        grad b = %db
        grad c = %c
    """,
}

COLUMNS = {
    "gradient of a bias": """
        input %g : tensor<RxCxT>
        input %x : tensor<RxCxT>
        %s = aten.silu_backward(%g, %x) : tensor<RxCxT>
        %b = aten.sum.dim_IntList(%s, dim = [0]) : tensor<CxT>
        output %b
        grad s = %s
    """,
}

MATMUL = {
    "bias and gelu after": """
        input %x : tensor<RxKxT>
        input %w : tensor<KxCxT>
        input %b : tensor<CxT>
        %m = aten.addmm(%b, %x, %w) : tensor<RxCxT>
        %g = aten.gelu(%m) : tensor<RxCxT>
        output %g
        grad m = %m
    """,
    "transposed weight, gate and residual": """
        input %x : tensor<RxKxT>
        input %w : tensor<CxKxT>
        input %u : tensor<RxCxT>
        input %y : tensor<RxCxT>
        %p = aten.permute(%w, dims = [1, 0]) : tensor<KxCxT>
        %m = aten.mm(%x, %p) : tensor<RxCxT>
        %s = aten.silu(%u) : tensor<RxCxT>
        %h = aten.mul.Tensor(%s, %m) : tensor<RxCxT>
        %r = aten.add.Tensor(%y, %h) : tensor<RxCxT>
        output %r
    """,
    "pointwise op and view before": """
        input %x : tensor<RKxT>
        input %w : tensor<KxCxT>
        %v = aten.view(%x) : tensor<RxKxT>
        %n = aten.silu(%v) : tensor<RxKxT>
        %m = aten.mm(%n, %w) : tensor<RxCxT>
        %s = aten.neg(%m) : tensor<RxCxT>
        output %s
    """,
}

FAMILIES: dict[str, Mapping[str, str]] = {
    "pointwise": POINTWISE,
    "rows": ROWS,
    "rows and columns": ROWS_AND_COLUMNS,
    "columns": COLUMNS,
    "matmul": MATMUL,
}

DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def region(text: str, rows: int, columns: int, inner: int, dtype: torch.dtype) -> FusedOp:
    """The ops of a text as one region. The statistics of halves are those of ATen on the CPU."""
    words = {
        "EC2": str(2 * columns), "RC": str(rows * columns), "RK": str(rows * inner),
        "R": str(rows), "C": str(columns), "K": str(inner),
        "T": DTYPES[dtype], "S": DTYPES[dtype], "U": DTYPES[dtype],
    }  # fmt: skip
    text = re.sub(r"\b(?:EC2|RC|RK|[RCKTSU])(?=x|>|\)|,|\b)", lambda m: words[m[0]], _spaced(text))
    program = step(text.replace(" x ", "x"))
    ops = list(program.ops)
    fused = fuse(ops, program.return_op, list(range(len(ops))))
    assert [o.name for o in program.ops] == ["kernel.fused"]
    KEPT.append(program)
    return fused


KEPT: list[object] = []
"""A module erases its ops when it goes; regions under test must not."""


def _spaced(text: str) -> str:
    """`tensor<RxCxT>` as `tensor<R x C x T>`, so that sizes are words."""
    return re.sub(
        r"tensor<([^>]*)>",
        lambda m: "tensor<" + re.sub(r"x(?=[A-Z1-9])|x(?=i\d)", " x ", m[1]) + ">",
        text,
    )


def inputs_of(op: FusedOp, seed: int) -> list[Tensor]:
    """Random operands; places for lookups are 0, and statistics are positive."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for value in op.operands:
        shape, dtype = shape_of(value), dtype_of_value(value)
        if dtype.is_floating_point:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
            found.append((drawn.abs() + 0.1 if value.name_hint == "rstd" else drawn).to(dtype))
        else:
            found.append(torch.zeros(shape, dtype=dtype))
    return found


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest element (at least 1) of each result."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        scale = max(1.0, b.double().abs().max().item())
        worst = max(worst, (a.double() - b.double()).abs().max().item() / scale)
    return worst


def run_both(text: str, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int) -> float:
    """The error of the kernel against ATen in float32 (float64 for float64)."""
    op = region(text, *sizes, dtype)
    given = inputs_of(op, seed)
    call = FusedCall(op)
    found = call(*given)
    assert call.reason is None, f"runs on ATen: {call.reason}"
    assert call.kernels
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    reference = region(text, *sizes, wide)
    wanted = run_on_aten(reference, [t.to(wide) if t.is_floating_point() else t for t in given])
    assert [t.dtype for t in found] == [dtype_of_value(v) for v in op.results]
    return error(found, wanted)


def launch_kernel(kernel: Kernel, config: Config, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a kernel's region, at one configuration."""
    return Launch(kernel, config, tensors[0].device)(tensors)


def reduction_kernel(op: FusedOp, whole_row: int = WHOLE_ROW) -> Kernel:
    """The reduction kernel of a region, which reads rows longer than `whole_row` in parts."""
    strides = [expected_strides(value) for value in op.operands]
    return ReductionTemplate(region_of(op), strides, whole_row).kernel()
