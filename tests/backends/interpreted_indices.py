"""Ops that make indices or move elements, and results joined later, in Triton's interpreter.

Run by test_triton_interpreter.py, in a process where Triton interprets kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch.launch import (
    FusedCall,
    join_parts,
    run_on_aten,
)
from shardweave.backends.triton.source.joining import PartialResult
from shardweave.backends.triton.source.parts import PartsQueue, Place
from shardweave.tests.backends import interpreter as _  # noqa: F401
from shardweave.tests.backends.interpreted_corners import assert_same, results
from shardweave.tests.backends.kernel_cases import launch_kernel
from shardweave.tests.backends.test_triton_launch import fused


def test_range_is_computed_from_the_place() -> None:
    text = """
        input %w : tensor<24x4xf32>
        %a = aten.arange.start_step(start = 3, step = 2) : tensor<10xi64>
        %e = aten.embedding(%w, %a) : tensor<10x4xf32>
        %b = aten.neg(%e) : tensor<10x4xf32>
        output %b
    """
    assert_same(fused(text), torch.randn(24, 4))


def test_range_alone_in_a_dtype_of_its_own() -> None:
    text = """
        %a = aten.arange.start_step(start = -4) : tensor<7xi32>
        %b = aten.mul.Scalar(%a, other = 3) : tensor<7xi32>
        output %b
        grad a = %a
    """
    assert_same(fused(text))


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_integers_are_divided_down_or_towards_zero(mode: str) -> None:
    text = f"""
        input %x : tensor<9xi64>
        %a = aten.div.Scalar_mode(%x, other = 3, rounding_mode = "{mode}") : tensor<9xi64>
        %n = aten.neg(%a) : tensor<9xi64>
        output %n
    """
    assert_same(fused(text), torch.tensor([-7, -6, -4, -1, 0, 1, 5, 6, 2**53 + 1]))


@pytest.mark.parametrize(
    ("pad", "value", "shape"),
    [("[1, 2]", "-100", "3x7"), ("[0, 0, 1, 0]", "7", "4x4"), ("[0, 0, 0, 3]", "0", "6x4")],
)
def test_padding_has_its_value(pad: str, value: str, shape: str) -> None:
    text = f"""
        input %x : tensor<3x4xi64>
        %a = aten.constant_pad_nd(%x, pad = {pad}, value = {value}) : tensor<{shape}xi64>
        %n = aten.neg(%a) : tensor<{shape}xi64>
        output %n
        grad a = %a
    """
    assert_same(fused(text), torch.arange(12).view(3, 4))


@pytest.mark.parametrize("size", [7, 40000])
def test_sums_of_all_elements_are_of_one_row(size: int) -> None:
    text = f"""
        input %x : tensor<{size}x1xf64>
        input %y : tensor<{size}x1xf64>
        %a = aten.sum.dim_IntList(%x, dim = [0, 1]) : tensor<f64>
        %b = aten.sum.dim_IntList(%y, dim = [0, 1], keepdim = true) : tensor<1x1xf64>
        %d = aten.div.Tensor(%a, %b) : tensor<1x1xf64>
        output %d
        grad a = %a
    """
    x, y = torch.randn(2, size, 1, dtype=torch.float64)
    assert_same(fused(text), x, y + 3)


def test_reshape_that_copies_is_written_in_its_own_order() -> None:
    text = """
        input %x : tensor<2x3x4x5xf32>
        %a = aten.neg(%x) : tensor<2x3x4x5xf32>
        %p = aten.permute(%a, dims = [0, 2, 1, 3]) : tensor<2x4x3x5xf32>
        %v = aten.view(%p) : tensor<8x15xf32>
        %t = aten.permute(%v, dims = [1, 0]) : tensor<15x8xf32>
        output %t
        grad a = %a
    """
    op = fused(text)
    found, wanted = results(op, torch.randn(2, 3, 4, 5))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    transposed = next(t for t in found if t.shape == (15, 8))
    assert transposed.stride() == (1, 15)  # the product that reads it is given a view


def test_parts_of_several_kernels_are_joined_by_one_launch() -> None:
    norm = fused("""
        input %g : tensor<70x6xf32>
        %n = aten.neg(%g) : tensor<70x6xf32>
        %s = aten.sum.dim_IntList(%n, dim = [0]) : tensor<6xf32>
        output %s
    """)
    other = fused("""
        input %x : tensor<130x150xbf16>
        %n = aten.neg(%x) : tensor<130x150xbf16>
        %s = aten.sum.dim_IntList(%n, dim = [0]) : tensor<150xbf16>
        %m = aten.amax(%n, dim = [0]) : tensor<150xbf16>
        output %m
        grad s = %s
    """)
    launches: list[int] = []

    def join(parts: Sequence[PartialResult], places: Sequence[Place]) -> None:
        launches.append(len(parts))
        join_parts(parts, places)

    queue = PartsQueue(join)
    g, x = torch.randn(70, 6), torch.randn(130, 150).bfloat16()
    x[3, 7] = float("nan")
    (summed,) = FusedCall(norm, queue=queue)(g)
    both = FusedCall(other, queue=queue)(x)
    assert launches == []
    queue.join()
    queue.join()
    assert launches == [3]
    torch.testing.assert_close(summed, -g.sum(0))
    by_name = dict(zip((str(r.name_hint) for r in other.results), both, strict=True))
    torch.testing.assert_close(by_name["m"], (-x).amax(0), equal_nan=True)
    torch.testing.assert_close(by_name["s"], (-x).float().sum(0).bfloat16(), equal_nan=True)


RAGGED = """
    input %x : tensor<{rows}x{columns}x{dtype}>
    input %w : tensor<{rows}x1x{dtype}>
    input %b : tensor<{columns}x{dtype}>
    %n = aten.mul.Tensor(%x, %w) : tensor<{rows}x{columns}x{dtype}>
    %m = aten.add.Tensor(%n, %b) : tensor<{rows}x{columns}x{dtype}>
    %s = aten.sum.dim_IntList(%m, dim = [0]) : tensor<{columns}x{dtype}>
    %q = aten.amax(%n, dim = [0]) : tensor<{columns}x{dtype}>
    output %s
    grad q = %q
    grad m = %m
"""


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(100, 37, "f32"), (40, 150, "f32"), (17, 3, "f32"), (33, 200, "f64"), (35, 84, "f64")],
)
def test_sums_of_columns_whose_rows_begin_anywhere(rows: int, columns: int, dtype: str) -> None:
    op = fused(RAGGED.format(rows=rows, columns=columns, dtype=dtype))
    wide = torch.float64 if dtype == "f64" else torch.float32
    x, w, b = torch.randn(rows, columns), torch.randn(rows, 1), torch.randn(columns)
    x[rows // 2, columns // 2] = float("nan")
    kernel = generate(op)
    assert "place = " in kernel.source
    tensors = [t.to(wide) for t in (x, w, b)]
    wanted = run_on_aten(op, tensors)
    for config in kernel.configs:
        for one, other in zip(launch_kernel(kernel, config, tensors), wanted, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "given", "made"),
    [
        ("sum.dim_IntList", "bf16", "bf16"),
        ("sum.dim_IntList", "f64", "f64"),
        ("sum.dim_IntList", "i32", "i64"),
        ("amax", "bf16", "bf16"),
        ("amin", "i64", "i64"),
    ],
)
def test_few_rows_in_memory_wait_with_parts(name: str, given: str, made: str) -> None:
    op = fused(f"""
        input %x : tensor<6x80x{given}>
        %s = aten.{name}(%x, dim = [0], keepdim = true) : tensor<1x80x{made}>
        output %s
    """)
    types = {"bf16": torch.bfloat16, "f64": torch.float64, "i32": torch.int32, "i64": torch.int64}
    x = (torch.randn(6, 80) * 1000).to(types[given])
    if given == "bf16":
        x[2, 7], x[4, 1] = float("nan"), float("inf")
    launches: list[int] = []

    def join(parts: Sequence[PartialResult], places: Sequence[Place]) -> None:
        launches.append(len(parts))
        join_parts(parts, places)

    queue = PartsQueue(join)
    (found,) = FusedCall(op, queue=queue)(x)
    assert launches == []
    queue.join()
    assert launches == [1]
    wide = run_on_aten(op, [x.double()])[0] if x.is_floating_point() else run_on_aten(op, [x])[0]
    torch.testing.assert_close(found, wide.to(types[made]), equal_nan=True)
