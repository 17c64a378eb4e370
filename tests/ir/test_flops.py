"""FLOPs of single ops, by the definition of what they compute."""

from __future__ import annotations

import pytest

from shardweave.ir.ops.registry import flops_of
from shardweave.tests.ir_text import step

CONV = (
    "stride = [1, 1], padding = [0, 0], dilation = [1, 1], transposed = false, "
    "output_padding = [0, 0], groups = {groups}"
)


@pytest.mark.parametrize(
    ("arguments", "op", "expected"),
    [
        (
            "input %x : tensor<3x5xf32>\ninput %w : tensor<5x7xf32>",
            "%y = aten.mm(%x, %w) : tensor<3x7xf32>",
            2 * 3 * 5 * 7,
        ),
        (
            "input %b : tensor<7xf32>\ninput %x : tensor<3x5xf32>\ninput %w : tensor<5x7xf32>",
            "%y = aten.addmm(%b, %x, %w) : tensor<3x7xf32>",
            2 * 3 * 5 * 7,
        ),
        (
            "input %x : tensor<2x3x5xf32>\ninput %w : tensor<2x5x7xf32>",
            "%y = aten.bmm(%x, %w) : tensor<2x3x7xf32>",
            2 * 2 * 3 * 5 * 7,
        ),
        (
            "input %x : tensor<2x4x6x6xf32>\ninput %w : tensor<8x4x3x3xf32>",
            f"%y = aten.convolution(%x, %w, {CONV.format(groups=1)}) : tensor<2x8x4x4xf32>",
            2 * (2 * 8 * 4 * 4) * (4 * 3 * 3),
        ),
        (
            "input %x : tensor<2x4x6x6xf32>\ninput %w : tensor<8x2x3x3xf32>",
            f"%y = aten.convolution(%x, %w, {CONV.format(groups=2)}) : tensor<2x8x4x4xf32>",
            2 * (2 * 8 * 4 * 4) * (2 * 3 * 3),
        ),
        ("input %x : tensor<3x5xf32>", "%y = aten.relu(%x) : tensor<3x5xf32>", 0),
    ],
)
def test_flops_of_one_op(arguments: str, op: str, expected: int) -> None:
    (only,) = step(f"{arguments}\n{op}\noutput %y").ops
    assert flops_of(only) == expected


@pytest.mark.parametrize(("mask", "times"), [("true, true", 2), ("false, true", 1)])
def test_backward_of_a_convolution_counts_the_gradients_that_are_wanted(
    mask: str, times: int
) -> None:
    result = "%dx, %dw" if times == 2 else "%dw"
    types = "tensor<2x4x6x6xf32>, tensor<8x4x3x3xf32>" if times == 2 else "tensor<8x4x3x3xf32>"
    text = f"""
        input %g : tensor<2x8x4x4xf32>
        input %x : tensor<2x4x6x6xf32>
        input %w : tensor<8x4x3x3xf32>
        {result} = aten.convolution_backward(%g, %x, %w, {CONV.format(groups=1)}, output_mask = [{mask}, false]) : {types}
        output %dw
    """
    (only,) = step(text).ops
    assert flops_of(only) == times * 2 * (2 * 8 * 4 * 4) * (4 * 3 * 3)


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    text = f"""
        input %q : tensor<2x3x5x4xf32>
        input %k : tensor<2x3x7x4xf32>
        input %v : tensor<2x3x7x4xf32>
        %o, %l = {name}(%q, %k, %v) : tensor<2x3x5x4xf32>, tensor<2x3x5xf32>
        %dq, %dk, %dv = {name}_backward(%o, %q, %k, %v, %o, %l, dropout_p = 0.0, is_causal = false) : tensor<2x3x5x4xf32>, tensor<2x3x7x4xf32>, tensor<2x3x7x4xf32>
        output %dq
    """
    product = 2 * 2 * 3 * 5 * 7 * 4
    assert [flops_of(op) for op in step(text).ops] == [2 * product, 5 * product]
