"""propagate-shardings: what a few annotations say about every other value."""

from __future__ import annotations

import pytest

from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import (
    assert_lines,
    assert_same_values,
    collectives,
    lines,
    shardings,
    step,
)


def propagated(text: str, mesh: str, expected: str) -> Program:
    """The program after the pass, after comparing its lines, which carry shardings."""
    after = run_passes(step(text, mesh), "propagate-shardings")
    assert_lines(lines(after, shardings=True), expected)
    return after


def test_column_parallel_weight_cuts_the_activations_until_the_row_parallel_one() -> None:
    after = propagated(
        """
        param %up : tensor<8x16xf64> [{}, {"tensor"}]
        param %down : tensor<16x8xf64> [{"tensor"}, {}]
        input %x : tensor<4x8xf64> [{"data"}, {}]
        %h = aten.mm(%x, %up) : tensor<4x16xf64>
        %a = aten.relu(%h) : tensor<4x16xf64>
        %y = aten.mm(%a, %down) : tensor<4x8xf64>
        %z = aten.relu(%y) : tensor<4x8xf64>
        output %z
        """,
        "data=2,tensor=2",
        """
        %h = aten.mm(%x, %up) <[{"data"}, {"tensor"}]> : tensor<4x16xf64>
        %a = aten.relu(%h) <[{"data"}, {"tensor"}]> : tensor<4x16xf64>
        %y = aten.mm(%a, %down) <[{"data"}, {}], unreduced = ["tensor"]> : tensor<4x8xf64>
        %y_1 = dist.reshard(%y, why = "a sum pending over tensor meets aten.relu") <[{"data"}, {}]> : tensor<4x8xf64>
        %z = aten.relu(%y_1) <[{"data"}, {}]> : tensor<4x8xf64>
        """,
    )
    assert shardings(after.results) == {"0": '[{"data"}, {}]'}
    assert not after.is_local


def test_sum_with_several_uses_is_reduced_where_it_is_made() -> None:
    propagated(
        """
        param %w : tensor<8x4xf64> [{"a"}, {}]
        input %x : tensor<4x8xf64> [{}, {"a"}]
        %y = aten.mm(%x, %w) : tensor<4x4xf64>
        %r = aten.neg(%y) : tensor<4x4xf64>
        %s = aten.mul.Scalar(%y, other = 2.0) : tensor<4x4xf64>
        output %r
        output %s
        """,
        "a=2",
        """
        %y = aten.mm(%x, %w) <[{}, {}], unreduced = ["a"]> : tensor<4x4xf64>
        %y_1 = dist.reshard(%y, why = "several ops read a sum pending over a") <[{}, {}]> : tensor<4x4xf64>
        %r = aten.neg(%y_1) <[{}, {}]> : tensor<4x4xf64>
        %s = aten.mul.Scalar(%y_1, other = 2.0) <[{}, {}]> : tensor<4x4xf64>
        """,
    )


def test_sum_with_several_uses_is_scattered_where_one_further_down_holds_shards() -> None:
    propagated(
        """
        param %w : tensor<8x4xf64> [{"a"}, {}]
        input %x : tensor<4x8xf64> [{}, {"a"}]
        input %r : tensor<4x4xf64> [{"a"}, {}]
        %y = aten.mm(%x, %w) : tensor<4x4xf64>
        %s = aten.mul.Scalar(%y, other = 2.0) : tensor<4x4xf64>
        %t = aten.neg(%y) : tensor<4x4xf64>
        %z = aten.add.Tensor(%s, %r) : tensor<4x4xf64>
        output %z
        output %t
        """,
        "a=2",
        """
        %y = aten.mm(%x, %w) <[{}, {}], unreduced = ["a"]> : tensor<4x4xf64>
        %y_1 = dist.reshard(%y, why = "several ops read a sum pending over a") <[{"a"}, {}]> : tensor<4x4xf64>
        %s = aten.mul.Scalar(%y_1, other = 2.0) <[{"a"}, {}]> : tensor<4x4xf64>
        %t = aten.neg(%y_1) <[{"a"}, {}]> : tensor<4x4xf64>
        %z = aten.add.Tensor(%s, %r) <[{"a"}, {}]> : tensor<4x4xf64>
        """,
    )


def test_wish_of_all_uses_travels_back_to_the_product_that_they_share() -> None:
    text = """
        param %w : tensor<16x8xf64> [{SUMMED}, {}]
        param %u : tensor<8x4xf64> [{"a"}, {}]
        param %v : tensor<8x4xf64> [{"a"}, {}]
        input %x : tensor<8x16xf64> [{ROWS}, {SUMMED}]
        %y = aten.mm(%x, %w) : tensor<8x8xf64>
        %r = aten.relu(%y) : tensor<8x8xf64>
        %h = aten.mul.Scalar(%y, other = 2.0) : tensor<8x8xf64>
        %t = aten.tanh(%h) : tensor<8x8xf64>
        %o = aten.mm(%r, %u) : tensor<8x4xf64>
        %p = aten.mm(%t, %v) : tensor<8x4xf64>
        output 0 = %o
        output 1 = %p
        """
    for rows, summed, message in (('"a"', "", "all_to_all"), ("", '"a"', "reduce_scatter")):
        before = step(text.replace("ROWS", rows).replace("SUMMED", summed), "a=2")
        after = run_passes(before, "propagate-shardings,insert-collectives,cse,dce")
        sent = [line.split("dist.")[1].split("(")[0] for line in collectives(after)]
        assert sent == [message, "all_reduce", "all_reduce"]
        assert_same_values(before, after)


def test_planned_weight_stays_where_it_is_however_large_the_activation() -> None:
    propagated(
        """
        param %w : tensor<8x4xf64> [{}, {"a"}]
        input %x : tensor<64x8xf64> [{}, {"a"}]
        %z = aten.mm(%x, %w) : tensor<64x4xf64>
        output %z
        """,
        "a=2",
        """
        %x_1 = dist.reshard(%x, why = "aten.mm reads it in these shards") <[{}, {}]> : tensor<64x8xf64>
        %z = aten.mm(%x_1, %w) <[{}, {"a"}]> : tensor<64x4xf64>
        """,
    )


def test_in_a_conflict_the_larger_tensor_stays() -> None:
    propagated(
        """
        input %y : tensor<4x8xf64> [{}, {"a"}]
        input %big : tensor<16x4x8xf64> [{}, {"a"}, {}]
        %z = aten.add.Tensor(%big, %y) : tensor<16x4x8xf64>
        output %z
        """,
        "a=2",
        """
        %y_1 = dist.reshard(%y, why = "aten.add.Tensor reads it in these shards") <[{"a"}, {}]> : tensor<4x8xf64>
        %z = aten.add.Tensor(%big, %y_1) <[{}, {"a"}, {}]> : tensor<16x4x8xf64>
        """,
    )


def test_merged_dims_keep_a_strided_shard_that_splits_again_without_a_gather() -> None:
    propagated(
        """
        input %x : tensor<4x8x6xf64> [{}, {"a"}, {}]
        %y = aten.view(%x) : tensor<32x6xf64>
        %z = aten.view(%y) : tensor<4x8x6xf64>
        output %z
        """,
        "a=2",
        """
        %y = aten.view(%x) <[{"a":4}, {}]> : tensor<32x6xf64>
        %z = aten.view(%y) <[{}, {"a"}, {}]> : tensor<4x8x6xf64>
        """,
    )


def test_lookup_in_vocabulary_shards_is_an_unreduced_sum() -> None:
    propagated(
        """
        param %w : tensor<16x6xf64> [{"tensor"}, {}]
        input %ids : tensor<4x8xi64> [{"data"}, {}]
        %y = aten.embedding(%w, %ids) : tensor<4x8x6xf64>
        %z = aten.relu(%y) : tensor<4x8x6xf64>
        output %z
        """,
        "data=2,tensor=2",
        """
        %y = aten.embedding(%w, %ids) <[{"data"}, {}, {}], unreduced = ["tensor"]> : tensor<4x8x6xf64>
        %y_1 = dist.reshard(%y, why = "a sum pending over tensor meets aten.relu") <[{"data"}, {}, {}]> : tensor<4x8x6xf64>
        %z = aten.relu(%y_1) <[{"data"}, {}, {}]> : tensor<4x8x6xf64>
        """,
    )


def test_free_parameter_adopts_the_shards_that_all_its_uses_want() -> None:
    after = propagated(
        """
        param %b : tensor<8xf64>
        input %x : tensor<4x8xf64> [{}, {"a"}]
        %y = aten.add.Tensor(%x, %b) : tensor<4x8xf64>
        output %y
        """,
        "a=2",
        '%y = aten.add.Tensor(%x, %b) <[{}, {"a"}]> : tensor<4x8xf64>',
    )
    assert shardings(after.arguments)["b"] == '[{"a"}]'


def test_free_parameter_whose_uses_disagree_stays_whole() -> None:
    after = propagated(
        """
        param %b : tensor<8xf64>
        input %x : tensor<4x8xf64> [{}, {"a"}]
        input %z : tensor<4x8xf64> [{}, {}]
        %y = aten.add.Tensor(%x, %b) : tensor<4x8xf64>
        %q = aten.add.Tensor(%z, %b) : tensor<4x8xf64>
        output %y
        output %q
        """,
        "a=2",
        """
        %b_1 = dist.reshard(%b, why = "aten.add.Tensor reads it in these shards") <[{"a"}]> : tensor<8xf64>
        %y = aten.add.Tensor(%x, %b_1) <[{}, {"a"}]> : tensor<4x8xf64>
        %q = aten.add.Tensor(%z, %b) <[{}, {}]> : tensor<4x8xf64>
        """,
    )
    assert shardings(after.arguments)["b"] == "[{}]"


def test_argument_that_the_user_annotated_as_whole_stays_whole() -> None:
    after = propagated(
        """
        param %b : tensor<8xf64> [{}]
        input %x : tensor<4x8xf64> [{}, {"a"}]
        %y = aten.add.Tensor(%x, %b) : tensor<4x8xf64>
        output %y
        """,
        "a=2",
        """
        %b_1 = dist.reshard(%b, why = "aten.add.Tensor reads it in these shards") <[{"a"}]> : tensor<8xf64>
        %y = aten.add.Tensor(%x, %b_1) <[{}, {"a"}]> : tensor<4x8xf64>
        """,
    )
    assert shardings(after.arguments)["b"] == "[{}]"


def test_constants_and_masks_are_made_in_the_shards_that_their_uses_want() -> None:
    propagated(
        """
        input %x : tensor<4x8x8xf64> [{"data"}, {"tensor"}, {}]
        %zero = aten.full(fill_value = 0.0) : tensor<f64>
        %one = aten.full(fill_value = true) : tensor<4x8x8xi1>
        %rows = aten.arange.start_step(start = 0) : tensor<8xi64>
        %r = aten.view(%rows) : tensor<8x1xi64>
        %cols = aten.arange.start_step(start = 0) : tensor<8xi64>
        %m = aten.le.Tensor(%r, %cols) : tensor<8x8xi1>
        %both = aten.bitwise_and.Tensor(%one, %m) : tensor<4x8x8xi1>
        %y = aten.where.self(%both, %x, %zero) : tensor<4x8x8xf64>
        output %y
        """,
        "data=2,tensor=2",
        """
        %zero = aten.full(fill_value = 0.0) <[]> : tensor<f64>
        %one = aten.full(fill_value = true) <[{"data"}, {"tensor"}, {}]> : tensor<4x8x8xi1>
        %rows = aten.arange.start_step(start = 0) <[{"tensor"}]> : tensor<8xi64>
        %r = aten.view(%rows) <[{"tensor"}, {}]> : tensor<8x1xi64>
        %cols = aten.arange.start_step(start = 0) <[{}]> : tensor<8xi64>
        %m = aten.le.Tensor(%r, %cols) <[{"tensor"}, {}]> : tensor<8x8xi1>
        %both = aten.bitwise_and.Tensor(%one, %m) <[{"data"}, {"tensor"}, {}]> : tensor<4x8x8xi1>
        %y = aten.where.self(%both, %x, %zero) <[{"data"}, {"tensor"}, {}]> : tensor<4x8x8xf64>
        """,
    )


def test_annotation_of_the_user_on_an_op_wins_over_what_its_operands_say() -> None:
    propagated(
        """
        param %up : tensor<8x16xf64> [{}, {"tensor"}]
        input %x : tensor<4x8xf64>
        %h = aten.mm(%x, %up) {wanted = [#dist.sharding<[{"tensor"}, {}]>]} : tensor<4x16xf64>
        %a = aten.relu(%h) : tensor<4x16xf64>
        output %a
        """,
        "tensor=2",
        """
        %h = aten.mm(%x, %up) <[{}, {"tensor"}]> : tensor<4x16xf64>
        %h_1 = dist.reshard(%h, why = "the plan wants it so") <[{"tensor"}, {}]> : tensor<4x16xf64>
        %a = aten.relu(%h_1) <[{"tensor"}, {}]> : tensor<4x16xf64>
        """,
    )


def test_sum_is_not_scattered_for_what_lies_behind_an_annotation() -> None:
    text = """
        param %w : tensor<8x4xf64> [{"a"}, {}]
        input %x : tensor<4x8xf64> [{}, {"a"}]
        input %s : tensor<4x4xf64>
        input %t : tensor<4x4xf64> [{"a"}, {}]
        %y = aten.mm(%x, %w) : tensor<4x4xf64>
        %n = aten.relu(%y) : tensor<4x4xf64>
        %r = aten.add.Tensor(%n, %s) PIN : tensor<4x4xf64>
        %z = aten.add.Tensor(%r, %t) : tensor<4x4xf64>
        output %z
    """
    whole = "{wanted = [#dist.sharding<[{}, {}]>]}"
    found = [
        lines(
            run_passes(step(text.replace("PIN", pin), "a=2"), "propagate-shardings"), shardings=True
        )[2]
        for pin in ("", whole)
    ]
    assert found[0].startswith('%n = aten.relu(%y_1) <[{"a"}, {}]>')
    assert found[1].startswith("%n = aten.relu(%y_1) <[{}, {}]>")


def test_two_axes_of_a_dim_stay_major_to_minor() -> None:
    after = propagated(
        """
        input %x : tensor<8x6xf64> [{"tensor", "data"}, {}]
        %z = aten.relu(%x) : tensor<8x6xf64>
        output %z
        """,
        "data=2,tensor=2",
        '%z = aten.relu(%x) <[{"tensor", "data"}, {}]> : tensor<8x6xf64>',
    )
    assert shardings(after.results) == {"0": '[{"tensor", "data"}, {}]'}


def test_updated_buffer_takes_the_sharding_of_the_buffer() -> None:
    after = propagated(
        """
        buffer %m : tensor<8xf64>
        input %x : tensor<4x8xf64> [{"data"}, {}]
        %s = aten.sum.dim_IntList(%x, dim = [0]) : tensor<8xf64>
        %n = aten.add.Tensor(%m, %s) : tensor<8xf64>
        buffer m = %n
        """,
        "data=2",
        """
        %s = aten.sum.dim_IntList(%x, dim = [0]) <[{}], unreduced = ["data"]> : tensor<8xf64>
        %s_1 = dist.reshard(%s, why = "a sum pending over data meets aten.add.Tensor") <[{}]> : tensor<8xf64>
        %n = aten.add.Tensor(%m, %s_1) <[{}]> : tensor<8xf64>
        """,
    )
    assert shardings(after.results) == {"m": "[{}]"}


def test_running_the_pass_again_changes_nothing() -> None:
    text = """
        param %w : tensor<8x4xf64> [{}, {"a"}]
        input %x : tensor<4x8xf64>
        %y = aten.mm(%x, %w) : tensor<4x4xf64>
        %z = aten.relu(%y) : tensor<4x4xf64>
        output %z
    """
    once = run_passes(step(text, "a=2"), "propagate-shardings")
    assert run_passes(once, "propagate-shardings") == once


def test_without_a_mesh_the_error_says_how_to_give_one() -> None:
    with pytest.raises(PassError, match=r"the program has no mesh; give one \(mesh=\.\.\., or"):
        run_passes(
            step("input %x : tensor<4xf64>\n%y = aten.relu(%x) : tensor<4xf64>\noutput %y"),
            "propagate-shardings",
        )


def test_sharding_of_what_is_too_small_is_one_clear_line() -> None:
    text = """
        input %x : tensor<1x4xf64> [{"a"}, {}]
        %y = aten.relu(%x) : tensor<1x4xf64>
        output %y
    """
    with pytest.raises(PassError) as error:
        run_passes(step(text, "a=2"), "propagate-shardings")
    assert str(error.value) == (
        "pass 'propagate-shardings': input 'x': a dim of size 1 is too small to shard over axes ['a'] "
        "of sizes [2]: with 1 indices for each shard over 'a', some ranks would get none; use "
        "smaller axes, or leave the dim unsharded."
    )
