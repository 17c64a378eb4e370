"""Corners in Triton's interpreter: integers, NaN, -0.0, indices out of range, regions at the edges.

Run by test_triton_interpreter.py, in a process where Triton interprets kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterError, interpreter_builder

from shardweave.backends.triton.launch.launch import FusedCall, run_on_aten
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.kernel_cases import launch_kernel, reduction_kernel
from shardweave.tests.backends.test_triton_launch import NO_INPUTS, fused

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = math.inf, math.nan


def results(op: FusedOp, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Those of the kernel and those of ATen. tensors: of the inputs, as ops first read them."""
    assert [t.dtype for t in tensors] == [dtype_of_value(value) for value in op.operands]
    call = FusedCall(op)
    found = call(*tensors)
    assert call.kernels, call.reason
    return found, run_on_aten(op, tensors)


def assert_same(op: FusedOp, *tensors: Tensor) -> None:
    """Assert that kernel and ATen give the same, signs of zeros included."""
    for found, wanted in zip(*results(op, *tensors), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
        if wanted.dtype.is_floating_point:
            assert torch.equal(found[wanted == 0].signbit(), wanted[wanted == 0].signbit())


def test_region_without_inputs() -> None:
    assert_same(fused(NO_INPUTS))


def test_sums_of_truth_values() -> None:
    text = """
        input %x : tensor<2x2xi1>
        input %y : tensor<2x2xi1>
        %a = aten.add.Tensor(%x, %y) : tensor<2x2xi1>
        %b = aten.add.Tensor(%x, %y, alpha = false) : tensor<2x2xi1>
        %c = aten.add.Scalar(%a, other = true) : tensor<2x2xi1>
        %d = aten.add.Scalar(%b, other = false) : tensor<2x2xi1>
        %e = aten.mul.Tensor(%x, %y) : tensor<2x2xi1>
        output %a
        output %b
        output %c
        output %d
        output %e
    """
    x = torch.tensor([[True, True], [False, False]])
    assert_same(fused(text), x, x.t().contiguous())


@pytest.mark.parametrize("op", ["amax", "amin"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ["i64", "i32", "ui8", "i1"])
def test_extremes_of_integers(op: str, dim: int, dtype: str) -> None:
    types = {"i64": torch.int64, "i32": torch.int32, "ui8": torch.uint8, "i1": torch.bool}
    given = torch.tensor([[2**53 + 1, 2**53, 7], [1, -5, 0], [-(2**62), -1, -(2**53) - 1]])
    x = torch.cat([given, given[:2]]).t().contiguous().t()
    x = (x % 199).to(types[dtype]) if dtype != "i64" else x
    if dtype == "i1":
        x = given.repeat(2, 1)[:5] > 0
    kept = 3 if dim == 0 else 5
    text = f"""
        input %x : tensor<5x3x{dtype}>
        %a = aten.{op}(%x, dim = [{dim}]) : tensor<{kept}x{dtype}>
        output %a
    """
    assert_same(fused(text), x)


@pytest.mark.parametrize("op", ["amax", "amin"])
@pytest.mark.parametrize("dim", [0, 1])
def test_extremes_keep_nan(op: str, dim: int) -> None:
    x = torch.randn(4, 6)
    x[1, 2], x[2] = NAN, NAN
    x[3, 0], x[3, 1] = INF, -INF
    text = f"""
        input %x : tensor<4x6xf32>
        %a = aten.{op}(%x, dim = [{dim}]) : tensor<{6 if dim == 0 else 4}xf32>
        output %a
    """
    assert_same(fused(text), x)
    if dim == 1:
        kernel = reduction_kernel(fused(text), whole_row=2)
        kernel = replace(kernel, configs=({"BLOCK_R": 1, "BLOCK_C": 2, "num_warps": 1},))
        (found,) = launch_kernel(kernel, kernel.configs[0], [x])
        torch.testing.assert_close(found, getattr(x, op)(1), equal_nan=True)


def test_pointwise_extremes_keep_nan_and_negative_zero() -> None:
    text = """
        input %x : tensor<6xf32>
        input %y : tensor<6xf32>
        %a = aten.maximum(%x, %y) : tensor<6xf32>
        %b = aten.minimum(%x, %y) : tensor<6xf32>
        %c = aten.neg(%x) : tensor<6xf32>
        %d = aten.relu(%x) : tensor<6xf32>
        output %a
        grad b = %b
        grad c = %c
        grad d = %d
    """
    x = torch.tensor([0.0, NAN, INF, -INF, 1.0, 3.0])
    y = torch.tensor([1.0, 1.0, NAN, NAN, -1.0, 4.0])
    assert_same(fused(text), x, y)


def test_not_of_integers_is_bitwise() -> None:
    text = """
        input %x : tensor<4xi64>
        input %m : tensor<4xi1>
        %a = aten.bitwise_not(%x) : tensor<4xi64>
        %b = aten.bitwise_not(%m) : tensor<4xi1>
        %c = aten.logical_not(%x) : tensor<4xi1>
        %d = aten.neg(%x) : tensor<4xi64>
        output %a
        grad b = %b
        grad c = %c
        grad d = %d
    """
    assert_same(fused(text), torch.tensor([0, 1, -7, 255]), torch.tensor([True, False] * 2))


def test_comparisons_round_their_number_to_the_operand_s_dtype() -> None:
    text = """
        input %x : tensor<3xbf16>
        %a = aten.gt.Scalar(%x, other = 0.1) : tensor<3xi1>
        %b = aten.ge.Scalar(%x, other = 0.1) : tensor<3xi1>
        output %a
        grad b = %b
    """
    assert_same(fused(text), torch.tensor([0.0, 0.1, 1.0]).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_dropout_with_its_mask_drawn_outside(dtype: str) -> None:
    """Its constants are those of eager PyTorch in every dtype."""
    text = f"""
        input %u : tensor<4x6xf32>
        input %x : tensor<4x6x{dtype}>
        %k = aten.lt.Scalar(%u, other = 0.9) : tensor<4x6xi1>
        %m = aten._to_copy(%k) : tensor<4x6x{dtype}>
        %p = aten.mul.Tensor(%x, %m) : tensor<4x6x{dtype}>
        %y = aten.mul.Scalar(%p, other = 1.1111111111111112) : tensor<4x6x{dtype}>
        output %y
        grad k = %k
    """
    types = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
    own = types.get(dtype, torch.float64)
    u = torch.rand(4, 6)
    u[0, :3] = torch.tensor([0.9, 0.8999999, 0.90000004])
    op = fused(text)
    found, wanted = results(op, u, torch.randn(4, 6, dtype=torch.float64).to(own))
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0], wanted[0])


LOOKUPS = {
    "embedding": """
        input %t : tensor<5x4xf32>
        input %i : tensor<3xi64>
        %e = aten.embedding(%t, %i) : tensor<3x4xf32>
        %n = aten.neg(%e) : tensor<3x4xf32>
        output %n
    """,
    "gather": """
        input %t : tensor<3x5xf32>
        input %i : tensor<3xi64>
        %v = aten.view(%i) : tensor<3x1xi64>
        %e = aten.gather(%t, %v, dim = 1) : tensor<3x1xf32>
        %n = aten.neg(%e) : tensor<3x1xf32>
        output %n
    """,
    "scatter_add": """
        input %t : tensor<3x5xf32>
        input %i : tensor<3xi64>
        %v = aten.view(%i) : tensor<3x1xi64>
        %o = aten.full(fill_value = 1.0) : tensor<3x1xf32>
        %e = aten.scatter_add(%t, %v, %o, dim = 1) : tensor<3x5xf32>
        %n = aten.neg(%e) : tensor<3x5xf32>
        output %n
    """,
}


@contextmanager
def assertions() -> Iterator[None]:
    """What `debug=True` is on a GPU."""
    builder: Any = interpreter_builder
    before = builder.options
    builder.options = replace(before, debug=True, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = before


@pytest.mark.parametrize("text", LOOKUPS.values(), ids=LOOKUPS.keys())
@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_index_out_of_range_reads_nothing_and_is_flagged(text: str, index: int) -> None:
    op = fused(text)
    table = torch.randn(5, 4) if "embedding" in text else torch.randn(3, 5)
    right = torch.tensor([4, 0, 2])
    wrong = torch.tensor([4, index, 2])
    right_ones, wrong_ones = (
        [table if value.name_hint == "t" else index for value in op.operands]
        for index in (right, wrong)
    )
    with assertions():
        assert_same(op, *right_ones)
        with pytest.raises((InterpreterError, AssertionError)) as error:
            FusedCall(op)(*wrong_ones)
        chain = f"{error.value} {error.value.__cause__}"
        assert "index out of range" in chain
    # Without assertions nothing outside of the table is read.
    (found,) = FusedCall(op)(*wrong_ones)
    (wanted,) = run_on_aten(op, right_ones)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[2], wanted[2])
    if "scatter" not in text:
        assert not found[1].any()


def test_gradient_of_a_norm_without_those_of_its_weights_covers_all_rows() -> None:
    text = """
        input %g : tensor<600x8xf32>
        input %x : tensor<600x8xf32>
        input %m : tensor<600x1xf32>
        input %r : tensor<600x1xf32>
        input %w : tensor<8xf32>
        %d, %dw, %db = aten.native_layer_norm_backward(%g, %x, %m, %r, %w, %w, output_mask = [true, true, true]) : tensor<600x8xf32>, tensor<8xf32>, tensor<8xf32>
        output %d
    """
    x, g, w = torch.randn(600, 8), torch.randn(600, 8), torch.randn(8)
    mean = x.mean(1, keepdim=True)
    rstd = (x.var(1, keepdim=True, correction=0) + 1e-5).rsqrt()
    assert_same(fused(text), g, x, mean, rstd, w)


def test_sums_of_columns_in_blocks_of_one_grid() -> None:
    text = """
        input %g : tensor<70x150xf32>
        %s = aten.neg(%g) : tensor<70x150xf32>
        %b = aten.sum.dim_IntList(%s, dim = [0]) : tensor<150xf32>
        output %b
    """
    op = fused(text)
    x = torch.randn(70, 150)
    kernel = reduction_kernel(op)
    for config in kernel.configs:
        (found,) = launch_kernel(kernel, config, [x])
        torch.testing.assert_close(found, -x.sum(0), rtol=1e-5, atol=1e-4)


def test_offsets_beyond_32_bits_read_the_right_elements() -> None:
    text = """
        input %x : tensor<3x2xi8>
        %n = aten.neg(%x) : tensor<3x2xi8>
        %a = aten.abs(%n) : tensor<3x2xi8>
        output %a
    """
    # Pages that nobody touches take no memory.
    x = torch.empty(2**31 + 16, dtype=torch.int8).as_strided((3, 2), (2**30, 1))
    x.copy_(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert_same(fused(text), x)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_small_numbers_keep_their_digits_in_tanh(dtype: str) -> None:
    text = f"""
        input %x : tensor<40x{dtype}>
        %t = aten.tanh(%x) : tensor<40x{dtype}>
        %n = aten.neg(%t) : tensor<40x{dtype}>
        output %n
    """
    wide = torch.logspace(-12, 1, 40, dtype=torch.float64)
    x = wide.to(torch.float32 if dtype == "f32" else torch.float64)
    ((found,), (wanted,)) = results(fused(text), x)
    bound = 1e-6 if dtype == "f32" else 1e-12
    assert ((found - wanted) / wanted).abs().max() <= bound


def test_numbers_are_stored_in_their_own_precision() -> None:
    text = """
        %a = aten.full(fill_value = 0.1) : tensor<11x16xf64>
        %b = aten.full(fill_value = 9007199254740993) : tensor<11x16xi64>
        %c = aten.full(fill_value = true) : tensor<11x16xi1>
        %d = aten.bitwise_not(%c) : tensor<11x16xi1>
        output %a
        grad b = %b
        grad d = %d
    """
    assert_same(fused(text))


def test_written_numbers_take_the_dtype_of_the_op_that_reads_them() -> None:
    text = """
        input %g : tensor<4xf64>
        input %m : tensor<4xi1>
        %n = aten.full(fill_value = -2.1) : tensor<1xf64>
        %o = aten.full(fill_value = 1.0) : tensor<1xf32>
        %a = aten.gelu_backward(%g, %n) : tensor<4xf64>
        %b = aten.maximum(%g, %n) : tensor<4xf64>
        %c = aten.logical_and(%o, %m) : tensor<4xi1>
        %w = aten.where.self(%m, %n, %o) : tensor<4xf64>
        output %a
        grad b = %b
        grad c = %c
        grad w = %w
    """
    mask = torch.tensor([True, False, False, True])
    found, wanted = results(fused(text), torch.randn(4, dtype=torch.float64) - 3, mask)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("other", ["0.0", "-0.0"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_sign_of_a_written_zero_is_kept(other: str, dtype: str) -> None:
    text = f"""
        input %x : tensor<3x{dtype}>
        %d = aten.div.Scalar(%x, other = {other}) : tensor<3x{dtype}>
        %n = aten.neg(%d) : tensor<3x{dtype}>
        output %n
        grad d = %d
    """
    types = {"f32": torch.float32, "f64": torch.float64}
    assert_same(fused(text), torch.tensor([1.0, -2.0, NAN], dtype=types[dtype]))


def test_safe_softmax_of_nan_is_nan() -> None:
    text = """
        input %x : tensor<3x4xf32>
        %s = aten._safe_softmax(%x, dim = 1) : tensor<3x4xf32>
        output %s
    """
    x = torch.randn(3, 4)
    x[0], x[1, :2], x[2] = NAN, -INF, -INF
    (found,), (wanted,) = results(fused(text), x)
    torch.testing.assert_close(found[:2], wanted[:2], equal_nan=True)
    assert not found[2].any()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_product_along_one_element_keeps_infinities(dtype: str) -> None:
    """Beyond that element there is nothing: infinity times 0 is no part of the sum."""
    text = f"""
        input %a : tensor<3x1x{dtype}>
        input %b : tensor<1x4x{dtype}>
        %m = aten.mm(%a, %b) : tensor<3x4x{dtype}>
        %n = aten.abs(%m) : tensor<3x4x{dtype}>
        output %n
    """
    own = torch.float32 if dtype == "f32" else torch.bfloat16
    a, b = torch.tensor([[1.0], [INF], [-2.0]]), torch.tensor([[1.0, -INF, INF, 0.5]])
    assert_same(fused(text), a.to(own), b.to(own))


def test_bfloat16_product_after_a_pointwise_op() -> None:
    text = """
        input %a : tensor<5x7xbf16>
        input %b : tensor<7x3xbf16>
        %n = aten.neg(%a) : tensor<5x7xbf16>
        %m = aten.mm(%n, %b) : tensor<5x3xbf16>
        output %m
    """
    a, b = torch.randn(5, 7).to(torch.bfloat16), torch.randn(7, 3).to(torch.bfloat16)
    assert_same(fused(text), a, b)


def test_elements_that_nothing_is_added_to_keep_their_sign() -> None:
    text = """
        input %t : tensor<3x5xf32>
        input %i : tensor<3x1xi64>
        input %o : tensor<3x1xf32>
        %e = aten.scatter_add(%t, %i, %o, dim = 1) : tensor<3x5xf32>
        output %e
    """
    t = torch.full((3, 5), -0.0)
    assert_same(fused(text), t, torch.tensor([[4], [0], [2]]), torch.tensor([[1.0], [-0.0], [INF]]))


def test_gradient_of_a_threshold_of_integers_is_an_integer() -> None:
    text = """
        input %g : tensor<4xi32>
        input %x : tensor<4xi32>
        %t = aten.threshold_backward(%g, %x, threshold = 0.5) : tensor<4xi32>
        %n = aten.bitwise_not(%t) : tensor<4xi32>
        output %n
    """
    g, x = torch.tensor([2**30 + 1, 2, 3, 4]), torch.tensor([1, 0, -1, 2])
    assert_same(fused(text), g.to(torch.int32), x.to(torch.int32))


def test_threshold_of_booleans_is_a_number() -> None:
    text = """
        input %g : tensor<4xf32>
        input %x : tensor<4xi1>
        %t = aten.threshold_backward(%g, %x, threshold = 0.5) : tensor<4xf32>
        %n = aten.neg(%t) : tensor<4xf32>
        output %n
    """
    assert_same(fused(text), torch.randn(4), torch.tensor([True, False, True, False]))


def test_statistics_of_written_numbers_have_their_precision() -> None:
    text = """
        input %w : tensor<4xf64>
        input %b : tensor<4xf64>
        %x = aten.full(fill_value = -2.1) : tensor<3x4xf64>
        %n, %mean, %rstd = aten.native_layer_norm(%x, %w, %b, eps = 1.0e-05) : tensor<3x4xf64>, tensor<3x1xf64>, tensor<3x1xf64>
        %s = aten.sum.dim_IntList(%x, dim = [1], keepdim = true) : tensor<3x1xf64>
        output %mean
        grad r = %rstd
        grad s = %s
    """
    found, wanted = results(fused(text), *torch.randn(2, 4, dtype=torch.float64))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


def test_comparison_of_one_number_meets_one_of_many() -> None:
    text = """
        input %x : tensor<1xf32>
        input %y : tensor<5x16xf32>
        %a = aten.logical_and(%x, %y) : tensor<5x16xi1>
        %c = aten.cat([%a, %a], dim = 0) : tensor<10x16xi1>
        output %c
    """
    y = torch.randn(5, 16).relu()
    assert_same(fused(text), torch.ones(1), y)


LOSS = """
    input %x : tensor<6x300xf32>
    %a = aten.amax(%x, dim = [1], keepdim = true) : tensor<6x1xf32>
    %s = aten.sub.Tensor(%x, %a) : tensor<6x300xf32>
    %e = aten.exp(%s) : tensor<6x300xf32>
    %t = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<6x1xf32>
    %l = aten.log(%t) : tensor<6x1xf32>
    %o = aten.add.Tensor(%a, %l) : tensor<6x1xf32>
    output %o
"""
SOFTMAX = """
    input %x : tensor<6x300xf32>
    %o = aten.{}(%x, dim = 1{}) : tensor<6x300xf32>
    output %o
"""


@pytest.mark.parametrize(
    ("text", "num_loops"),
    [
        (LOSS, 1),
        (SOFTMAX.format("_softmax", ", half_to_float = false"), 2),
        (SOFTMAX.format("_safe_softmax", ""), 2),
    ],
    ids=["log-sum-exp", "softmax", "safe softmax"],
)
def test_normaliser_of_long_rows_takes_one_pass(text: str, num_loops: int) -> None:
    op = fused(text)
    x = torch.randn(6, 300) * 30
    x[1, 250], x[2], x[3, :100], x[4, 7], x[5, 299] = INF, -INF, -INF, NAN, -INF
    kernel = reduction_kernel(op, whole_row=10)
    assert kernel.source.count("for start in range(0, n_cols, BLOCK_C):") == num_loops
    config = {"BLOCK_R": 1, "BLOCK_C": 64, "num_warps": 1}
    (found,) = launch_kernel(kernel, config, [x])
    (wanted,) = run_on_aten(op, [x])
    torch.testing.assert_close(found, wanted, equal_nan=True)
