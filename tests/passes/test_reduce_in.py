"""reduce-in: gradients are added up in the dtype that is asked for, and nothing in less than it."""

from __future__ import annotations

import pytest

from shardweave.passes.messages.gradient_buckets import bucket_gradients
from shardweave.passes.messages.pending_gradients import leave_gradients_pending
from shardweave.passes.notes import PassNote
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_lines, lines, step

GRADIENT = """
    input %x : tensor<4xf32> [{}]
    %p = aten.neg(%x) : tensor<4xf32>
    %a = dist.all_reduce(%p, axes = ["data"]) : tensor<4xf32>
    %b = aten.neg(%x) : tensor<4xf32>
    %c = dist.all_reduce(%b, axes = ["data"]) : tensor<4xf32>
    grad x = %a
    output %c
"""
PRODUCT = """
    input %x : tensor<4x8xbf16> [{}, {"tensor"}]
    input %w : tensor<8x4xbf16> [{"tensor"}, {}]
    input %b : tensor<4xbf16> [{}]
    %p = aten.mm(%x, %w) : tensor<4x4xbf16>
    %a = dist.all_reduce(%p, axes = ["tensor"]) : tensor<4x4xbf16>
    %m = aten.amax(%p, dim = [0]) : tensor<4xbf16>
    %c = aten.add.Tensor(%a, %b) : tensor<4x4xbf16>
    %d = aten.relu(%c) : tensor<4x4xbf16>
    output %d
"""
BFLOAT16 = 'reduce-in{dtype="bfloat16"}'


def test_gradient_is_added_up_in_fewer_digits_and_other_values_are_not() -> None:
    before = step(GRADIENT, "data=2", local=True)
    after = run_passes(before, BFLOAT16)
    assert_lines(
        lines(after),
        """
        %p = aten.neg(%x) : tensor<4xf32>
        %p_1 = aten._to_copy(%p) : tensor<4xbf16>
        %a = dist.all_reduce(%p_1, axes = ["data"]) : tensor<4xbf16>
        %b = aten.neg(%x) : tensor<4xf32>
        %c = dist.all_reduce(%b, axes = ["data"]) : tensor<4xf32>
        %a_1 = aten._to_copy(%a) : tensor<4xf32>
        """,
    )
    sent = [sum(c.sent_bytes for c in p.stats().collectives) for p in (before, after)]
    assert sent == [2 * 16, 8 + 16]


def test_terms_of_fewer_digits_are_added_up_in_more_and_the_bias_to_that() -> None:
    text = PRODUCT.replace("    %m = aten.amax(%p, dim = [0]) : tensor<4xbf16>\n", "")
    assert_lines(
        lines(run_passes(step(text, "tensor=2", local=True), 'reduce-in{dtype="float32"}')),
        """
        %p = aten.mm(%x, %w) : tensor<4x4xbf16>
        %p_1 = aten._to_copy(%p) : tensor<4x4xf32>
        %a = dist.all_reduce(%p_1, axes = ["tensor"]) : tensor<4x4xf32>
        %b_1 = aten._to_copy(%b) : tensor<4xf32>
        %c = aten.add.Tensor(%a, %b_1) : tensor<4x4xf32>
        %c_1 = aten._to_copy(%c) : tensor<4x4xbf16>
        %d = aten.relu(%c_1) : tensor<4x4xbf16>
        """,
    )


def test_every_tensor_of_a_message_is_looked_at_and_maxima_are_left_alone() -> None:
    text = """
        input %x : tensor<4xf32> [{}]
        input %y : tensor<4xf64> [{}]
        %p = aten.neg(%x) : tensor<4xf32>
        %q = aten.neg(%y) : tensor<4xf64>
        %a, %c = dist.all_reduce(%p, %q, axes = ["data"]) : tensor<4xf32>, tensor<4xf64>
        %m = dist.all_reduce(%x, axes = ["data"], op = "max") : tensor<4xf32>
        grad x = %a
        grad y = %c
        grad z = %m
    """
    after = run_passes(step(text, "data=2", local=True), 'reduce-in{dtype="float32"}')
    found = [line for line in lines(after) if "dist." in line]
    assert found == [
        '%a, %c = dist.all_reduce(%p, %q_1, axes = ["data"]) : tensor<4xf32>, tensor<4xf32>',
        '%m = dist.all_reduce(%x, axes = ["data"], op = "max") : tensor<4xf32>',
    ]


def test_scattered_gradient_is_added_up_in_the_dtype_too() -> None:
    text = """
        input %x : tensor<4xf32> [{"data"}]
        %p = aten.neg(%x) : tensor<4xf32>
        %a = dist.reduce_scatter(%p, axes = ["data"], dim = 0, block = 1) : tensor<2xf32>
        grad x = %a
    """
    after = run_passes(step(text, "data=2", local=True), BFLOAT16)
    assert [line.rpartition(" : ")[2] for line in lines(after)[1:4]] == [
        "tensor<4xbf16>",
        "tensor<2xbf16>",
        "tensor<2xf32>",
    ]


def test_gradient_in_another_dtype_is_left_pending_as_it_was_before() -> None:
    program = run_passes(step(GRADIENT, "data=2", local=True), BFLOAT16)
    assert leave_gradients_pending(program) == 1
    assert_lines(
        lines(program),
        """
        %p = aten.neg(%x) : tensor<4xf32>
        %b = aten.neg(%x) : tensor<4xf32>
        %c = dist.all_reduce(%b, axes = ["data"]) : tensor<4xf32>
        func.return %p, %c : tensor<4xf32>, tensor<4xf32>
        """,
    )


def test_gradients_in_another_dtype_are_gradients_to_buckets() -> None:
    program = run_passes(step(GRADIENT, "data=2", local=True), BFLOAT16)
    assert bucket_gradients(program, 2**20) == 1


def test_nothing_to_do_is_said_and_an_unknown_dtype_refused() -> None:
    before = step(GRADIENT, "data=2", local=True)
    with pytest.warns(PassNote, match="in another dtype than float32"):
        assert run_passes(before, 'reduce-in{dtype="float32"}') == before
    with pytest.raises(ValueError, match="dtype 'int8' is unknown; use one of float32, bfloat16"):
        run_passes(before, 'reduce-in{dtype="int8"}')
