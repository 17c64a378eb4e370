"""An addmm is split where its contracted dim is cut, and stays whole everywhere else."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.verify.program import verify
from shardweave.passes.prepare.split_addmm import split_addmms
from shardweave.tests.ir_text import assert_passes_to, lines, step

LINEAR = """
    param %w : tensor<8x16xf64> {weight}
    param %b : tensor<8xf64>
    input %x : tensor<4x16xf64>
    %wt = aten.permute(%w, dims = [1, 0]) : tensor<16x8xf64>
    %y = aten.addmm(%b, %x, %wt) : tensor<4x8xf64>
    %z = aten.relu(%y) : tensor<4x8xf64>
    output %z
"""


def linear(weight: str) -> str:
    return LINEAR.replace("{weight}", weight)


def test_row_parallel_addmm_adds_its_bias_once_after_the_reduction() -> None:
    assert_passes_to(
        "split-addmm,add-pending-sums,propagate-shardings,insert-collectives",
        linear('[{}, {"tensor"}]'),
        """
        %wt = aten.permute(%w, dims = [1, 0]) : tensor<8x8xf64>
        %mm = aten.mm(%x, %wt) : tensor<4x8xf64>
        %all_reduce = dist.all_reduce(%mm, axes = ["tensor"]) : tensor<4x8xf64>
        %y = aten.add.Tensor(%all_reduce, %b) : tensor<4x8xf64>
        %z = aten.relu(%y) : tensor<4x8xf64>
        """,
        "tensor=2",
    )


def test_column_parallel_addmm_stays_whole() -> None:
    assert_passes_to(
        "split-addmm,add-pending-sums,propagate-shardings,insert-collectives",
        linear('[{"tensor"}, {}]'),
        """
        %wt = aten.permute(%w, dims = [1, 0]) : tensor<16x4xf64>
        %y = aten.addmm(%b, %x, %wt) : tensor<4x4xf64>
        %z = aten.relu(%y) : tensor<4x4xf64>
        """,
        "tensor=2",
    )


@pytest.mark.parametrize("weight", ["", "[{}, {}]", '[{"tensor"}, {}]'])
def test_nothing_is_split_unless_the_contracted_dim_is_cut(weight: str) -> None:
    program = step(linear(weight), "tensor=2")
    assert split_addmms(program) == 0
    assert "aten.addmm" in "".join(lines(program))


def test_weight_is_followed_through_casts_and_permutations() -> None:
    text = """
        param %w : tensor<16x8xf32> [{"tensor"}, {}]
        param %b : tensor<8xf64>
        input %x : tensor<4x16xf64>
        %c = aten._to_copy(%w) : tensor<16x8xf64>
        %t = aten.permute(%c, dims = [1, 0]) : tensor<8x16xf64>
        %u = aten.permute(%t, dims = [1, 0]) : tensor<16x8xf64>
        %y = aten.addmm(%b, %x, %u) : tensor<4x8xf64>
        output %y
    """
    assert split_addmms(step(text, "tensor=2")) == 1


def test_addmm_by_something_that_is_no_parameter_stays_whole() -> None:
    text = """
        param %w : tensor<16x8xf64> [{"tensor"}, {}]
        param %b : tensor<8xf64>
        input %x : tensor<4x16xf64>
        %r = aten.relu(%w) : tensor<16x8xf64>
        %y = aten.addmm(%b, %x, %r) : tensor<4x8xf64>
        output %y
    """
    assert split_addmms(step(text, "tensor=2")) == 0


def test_split_op_keeps_layer_phase_name_and_the_annotation_of_the_user() -> None:
    text = linear('[{}, {"tensor"}]').replace(
        "%wt) :",
        '%wt) {layer = "fc", phase = forward, wanted = [#dist.sharding<[{"tensor"}, {}]>]} :',
    )
    program = step(text, "tensor=2")
    split_addmms(program)
    product, total = [line.strip() for line in str(program).splitlines() if 'layer = "fc"' in line]
    assert product.startswith("%mm = aten.mm(")
    assert "wanted" not in product
    assert total.startswith('%y = aten.add.Tensor(%mm, %b) {layer = "fc", phase = forward, wanted')


def test_scales_of_the_bias_and_of_the_product_are_ops_of_their_own() -> None:
    text = linear('[{}, {"tensor"}]').replace("%wt) :", "%wt, beta = 2, alpha = 0.5) :")
    program = step(text, "tensor=2")
    split_addmms(program)
    verify(program)
    assert [op.name for op in program.ops][-5:-1] == [
        "aten.mm", "aten.mul.Scalar", "aten.mul.Scalar", "aten.add.Tensor",
    ]  # fmt: skip
    scales = [op for op in program.ops if isinstance(op, AtenOp) and "mul" in op.name]
    assert [op.value("other") for op in scales] == [0.5, 2]
