"""Result types as torch infers them, and why it refuses operands."""

from __future__ import annotations

import logging

import pytest
import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import tensor_type
from shardweave.ir.ops.infer import infer_types
from shardweave.tests.ir_text import step


def inferred(arguments: str, op: str) -> tuple[str, ...] | str:
    (only,) = step(f"{arguments}\n%y = {op}\noutput %y").ops
    assert isinstance(only, AtenOp)
    types = infer_types(only)
    return types if isinstance(types, str) else tuple(str(type_) for type_ in types)


def test_types_follow_from_the_operands_whatever_the_text_says() -> None:
    found = inferred(
        "input %x : tensor<3x5xf32>", "aten.sum.dim_IntList(%x, dim = [1]) : tensor<9xf64>"
    )
    assert found == ("tensor<3xf32>",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stated", ["f64", "f32"])
def test_types_of_attention_are_those_that_its_kernel_gives(
    dtype: torch.dtype, stated: str
) -> None:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = torch.zeros(2, 4, 8, 4, dtype=dtype)
    types = tuple(str(tensor_type(x.shape, x.dtype)) for x in kernel(query, query, query))
    attention = "%y, %l = aten._scaled_dot_product_flash_attention_for_cpu(%x, %x, %x)"
    program = step(
        f"input %x : {types[0]}\n{attention} : {types[0]}, tensor<2x4x8x{stated}>\noutput %y"
    )
    (only,) = program.ops
    assert isinstance(only, AtenOp)
    assert tuple(map(str, infer_types(only))) == types


def test_shape_of_a_view_is_its_result_type() -> None:
    assert inferred("input %x : tensor<4x6xf32>", "aten.view(%x) : tensor<8x3xf32>") == (
        "tensor<8x3xf32>",
    )


def test_statistics_of_a_half_precision_norm_are_those_of_the_cpu() -> None:
    text = "%y, %m, %r = aten.native_layer_norm(%x, none, none, eps = 1.0e-05)"
    program = step(
        f"input %x : tensor<4x6xbf16>\n{text} : tensor<4x6xbf16>, tensor<4x1xbf16>, tensor<4x1xbf16>\n"
        "output %y"
    )
    (only,) = program.ops
    assert isinstance(only, AtenOp)
    types = infer_types(only)
    assert not isinstance(types, str)
    assert len(types) == 3


@pytest.mark.parametrize(
    ("arguments", "op"),
    [
        ("input %x : tensor<3x5xf32>", "aten.mm(%x, %x) : tensor<3x3xf32>"),
        ("input %x : tensor<3x5xf32>", "aten.view(%x) : tensor<4x4xf32>"),
        ("input %x : tensor<3x5xf32>", "aten.sum.dim_IntList(%x, dim = [7]) : tensor<3xf32>"),
        (
            "input %x : tensor<3x5x1xf32>\ninput %i : tensor<2xi64>",
            "aten.embedding(%x, %i) : tensor<2xf32>",
        ),
        ("input %x : tensor<3xf32>", "aten.nonzero(%x) : tensor<3x1xi64>"),
    ],
)
def test_operands_that_torch_refuses_give_its_reason_in_one_line(arguments: str, op: str) -> None:
    reason = inferred(arguments, op)
    assert isinstance(reason, str)
    assert reason
    assert "\n" not in reason


def test_refusal_is_an_answer_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        inferred("input %x : tensor<3x7xf32>", "aten.mm(%x, %x) : tensor<3x3xf32>")
    assert caplog.records == []
