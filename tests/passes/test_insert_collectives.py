"""insert-collectives: where messages stand, which they are, and that there are no others."""

from __future__ import annotations

import pytest

from shardweave.passes.notes import PassNote
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import (
    assert_passes_to,
    assert_same_values,
    collectives,
    lines,
    shardings,
    step,
)

PASSES = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives"

PAIR = """
    param %up : tensor<8x16xf64> [{}, {"tensor"}]
    param %down : tensor<16x8xf64> [{"tensor"}, {}]
    input %x : tensor<4x8xf64>
    %h = aten.mm(%x, %up) : tensor<4x16xf64>
    %a = aten.relu(%h) : tensor<4x16xf64>
    %y = aten.mm(%a, %down) : tensor<4x8xf64>
    %z = aten.relu(%y) : tensor<4x8xf64>
    output %z
"""


def test_column_and_row_parallel_pair_needs_one_all_reduce() -> None:
    after = assert_passes_to(
        PASSES,
        PAIR,
        """
        %h = aten.mm(%x, %up) : tensor<4x8xf64>
        %a = aten.relu(%h) : tensor<4x8xf64>
        %y = aten.mm(%a, %down) : tensor<4x8xf64>
        %all_reduce = dist.all_reduce(%y, axes = ["tensor"]) : tensor<4x8xf64>
        %z = aten.relu(%all_reduce) : tensor<4x8xf64>
        """,
        "tensor=2",
    )
    assert after.is_local
    assert shardings(after.arguments)["up"] == '[{}, {"tensor"}]'


def test_pending_sum_travels_through_a_linear_op_before_it_is_reduced() -> None:
    assert_passes_to(
        PASSES,
        PAIR.replace("aten.relu(%y)", "aten.mul.Scalar(%y, other = 2.0)"),
        """
        ...
        %y = aten.mm(%a, %down) : tensor<4x8xf64>
        %z = aten.mul.Scalar(%y, other = 2.0) : tensor<4x8xf64>
        %all_reduce = dist.all_reduce(%z, axes = ["tensor"]) : tensor<4x8xf64>
        """,
        "tensor=2",
    )


def test_input_gradients_of_q_k_and_v_are_added_before_one_all_reduce() -> None:
    assert_passes_to(
        PASSES,
        """
        param %q : tensor<8x8xf64> [{"tensor"}, {}]
        param %k : tensor<8x8xf64> [{"tensor"}, {}]
        param %v : tensor<8x8xf64> [{"tensor"}, {}]
        input %dq : tensor<4x8xf64> [{}, {"tensor"}]
        input %dk : tensor<4x8xf64> [{}, {"tensor"}]
        input %dv : tensor<4x8xf64> [{}, {"tensor"}]
        input %x : tensor<4x8xf64>
        %xq = aten.mm(%dq, %q) : tensor<4x8xf64>
        %xk = aten.mm(%dk, %k) : tensor<4x8xf64>
        %qk = aten.add.Tensor(%xq, %xk) : tensor<4x8xf64>
        %xv = aten.mm(%dv, %v) : tensor<4x8xf64>
        %qkv = aten.add.Tensor(%qk, %xv) : tensor<4x8xf64>
        %dx = aten.mul.Tensor(%qkv, %x) : tensor<4x8xf64>
        output %dx
        """,
        """
        ...
        %qkv = aten.add.Tensor(%qk, %xv) : tensor<4x8xf64>
        %all_reduce = dist.all_reduce(%qkv, axes = ["tensor"]) : tensor<4x8xf64>
        %dx = aten.mul.Tensor(%all_reduce, %x) : tensor<4x8xf64>
        """,
        "tensor=2",
    )


def test_sum_that_is_needed_in_shards_is_reduce_scattered() -> None:
    assert_passes_to(
        PASSES,
        """
        param %down : tensor<16x8xf64> [{"tensor"}, {}]
        input %a : tensor<4x16xf64> [{}, {"tensor"}]
        input %x : tensor<4x8xf64> [{"tensor"}, {}]
        %y = aten.mm(%a, %down) : tensor<4x8xf64>
        %z = aten.add.Tensor(%y, %x) : tensor<4x8xf64>
        output %z
        """,
        """
        %y = aten.mm(%a, %down) : tensor<4x8xf64>
        %reduce_scatter = dist.reduce_scatter(%y, axes = ["tensor"], dim = 0, block = 2) : tensor<2x8xf64>
        %z = aten.add.Tensor(%reduce_scatter, %x) : tensor<2x8xf64>
        """,
        "tensor=2",
    )


def test_two_uses_share_one_gather() -> None:
    assert_passes_to(
        PASSES,
        """
        param %k : tensor<8x16xf64> [{}, {"tensor"}]
        param %v : tensor<8x16xf64> [{}, {"tensor"}]
        input %x : tensor<4x8xf64> [{"tensor"}, {}]
        %xk = aten.mm(%x, %k) : tensor<4x16xf64>
        %xv = aten.mm(%x, %v) : tensor<4x16xf64>
        output %xk
        output %xv
        """,
        """
        %all_gather = dist.all_gather(%x, axes = ["tensor"], dim = 0, block = 2) : tensor<4x8xf64>
        %xk = aten.mm(%all_gather, %k) : tensor<4x8xf64>
        %xv = aten.mm(%all_gather, %v) : tensor<4x8xf64>
        """,
        "tensor=2",
    )


def test_two_views_of_a_value_share_its_gather() -> None:
    assert_passes_to(
        f"{PASSES},dce",
        """
        param %k : tensor<8x16xf64> [{}, {"tensor"}]
        param %v : tensor<8x16xf64> [{}, {"tensor"}]
        input %x : tensor<2x4x8xf64> [{}, {"tensor"}, {}]
        %n = aten.relu(%x) : tensor<2x4x8xf64>
        %f = aten.view(%n) : tensor<8x8xf64>
        %xk = aten.mm(%f, %k) : tensor<8x16xf64>
        %g = aten.view(%n) : tensor<8x8xf64>
        %xv = aten.mm(%g, %v) : tensor<8x16xf64>
        output %xk
        output %xv
        """,
        """
        %n = aten.relu(%x) : tensor<2x2x8xf64>
        %all_gather = dist.all_gather(%n, axes = ["tensor"], dim = 1, block = 2) : tensor<2x4x8xf64>
        %f = aten.view(%all_gather) : tensor<8x8xf64>
        %xk = aten.mm(%f, %k) : tensor<8x8xf64>
        %g = aten.view(%all_gather) : tensor<8x8xf64>
        %xv = aten.mm(%g, %v) : tensor<8x8xf64>
        """,
        "tensor=2",
    )


STEP = """
    param %w : tensor<8x16xf64> {w}
    input %x : tensor<4x8xf64> [{{"data"}}, {{}}]
    tangent %t : tensor<f64>
    %y = aten.mm(%x, %w) : tensor<4x16xf64>
    %s = aten.sum.dim_IntList(%y, dim = [0, 1]) : tensor<f64>
    %g = aten.mul.Tensor(%y, %t) {{phase = backward}} : tensor<4x16xf64>
    %xt = aten.permute(%x, dims = [1, 0]) {{phase = backward}} : tensor<8x4xf64>
    %dw = aten.mm(%xt, %g) {{phase = backward}} : tensor<8x16xf64>
    output %s
    grad w = %dw {dw}
"""


def test_gradient_of_a_whole_parameter_is_reduced_over_the_batch_axis() -> None:
    after = assert_passes_to(
        PASSES,
        STEP.format(w="", dw=""),
        """
        %y = aten.mm(%x, %w) : tensor<2x16xf64>
        %s = aten.sum.dim_IntList(%y, dim = [0, 1]) : tensor<f64>
        %all_reduce = dist.all_reduce(%s, axes = ["data"]) : tensor<f64>
        %g = aten.mul.Tensor(%y, %t) : tensor<2x16xf64>
        %xt = aten.permute(%x, dims = [1, 0]) : tensor<8x2xf64>
        %dw = aten.mm(%xt, %g) : tensor<8x16xf64>
        %all_reduce_1 = dist.all_reduce(%dw, axes = ["data"]) : tensor<8x16xf64>
        func.return %all_reduce, %all_reduce_1 : tensor<f64>, tensor<8x16xf64>
        """,
        "data=2",
    )
    assert shardings(after.results) == {"0": "[]", "w": "[{}, {}]"}


def test_gradient_wanted_in_shards_is_reduce_scattered_to_them() -> None:
    after = assert_passes_to(
        PASSES,
        STEP.format(w="", dw='[{"data"}, {}]'),
        """
        ...
        %dw = aten.mm(%xt, %g) : tensor<8x16xf64>
        %reduce_scatter = dist.reduce_scatter(%dw, axes = ["data"], dim = 0, block = 4) : tensor<4x16xf64>
        func.return %all_reduce, %reduce_scatter : tensor<f64>, tensor<4x16xf64>
        """,
        "data=2",
    )
    assert shardings(after.results)["w"] == '[{"data"}, {}]'


def test_gradient_comes_out_in_the_shards_of_its_parameter() -> None:
    after = assert_passes_to(
        PASSES,
        STEP.format(w='[{}, {"tensor"}]', dw=""),
        """
        %y = aten.mm(%x, %w) : tensor<2x8xf64>
        %s = aten.sum.dim_IntList(%y, dim = [0, 1]) : tensor<f64>
        %all_reduce = dist.all_reduce(%s, axes = ["data", "tensor"]) : tensor<f64>
        ...
        %dw = aten.mm(%xt, %g) : tensor<8x8xf64>
        %all_reduce_1 = dist.all_reduce(%dw, axes = ["data"]) : tensor<8x8xf64>
        """,
        "data=2,tensor=2",
    )
    assert shardings(after.results)["w"] == '[{}, {"tensor"}]'


def test_maximum_over_shards_is_reduced_as_a_maximum() -> None:
    assert_passes_to(
        PASSES,
        """
        input %x : tensor<4x8xf64> [{"data"}, {"tensor"}]
        %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<4x1xf64>
        %d = aten.sub.Tensor(%x, %m) : tensor<4x8xf64>
        output %d
        """,
        """
        %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<2x1xf64>
        %all_reduce = dist.all_reduce(%m, axes = ["tensor"], op = "max") : tensor<2x1xf64>
        %d = aten.sub.Tensor(%x, %all_reduce) : tensor<2x4xf64>
        """,
        "data=2,tensor=2",
    )


def test_axis_that_moves_between_dims_costs_one_all_to_all() -> None:
    assert_passes_to(
        PASSES,
        """
        input %x : tensor<4x8xf64> [{"data"}, {}]
        %y = aten.relu(%x) : tensor<4x8xf64>
        output %y [{}, {"data"}]
        """,
        """
        %y = aten.relu(%x) : tensor<2x8xf64>
        %all_to_all = dist.all_to_all(%y, axes = ["data"], dim = 1, block = 4, from_dim = 0, from_block = 2) : tensor<4x4xf64>
        """,
        "data=2",
    )


def test_strided_shards_are_dealt_in_blocks() -> None:
    assert_passes_to(
        PASSES,
        """
        input %x : tensor<12xf64> [{"tensor":2}]
        %y = aten.relu(%x) : tensor<12xf64>
        output %y [{}]
        """,
        """
        %y = aten.relu(%x) : tensor<6xf64>
        %all_gather = dist.all_gather(%y, axes = ["tensor"], dim = 0, block = 2) : tensor<12xf64>
        """,
        "tensor=2",
    )


def test_annotation_of_the_user_on_an_op_is_kept_and_later_uses_start_from_it() -> None:
    assert_passes_to(
        PASSES,
        """
        param %up : tensor<8x16xf64> [{}, {"tensor"}]
        input %x : tensor<4x8xf64>
        %h = aten.mm(%x, %up) {wanted = [#dist.sharding<[{}, {}]>]} : tensor<4x16xf64>
        %a = aten.relu(%h) : tensor<4x16xf64>
        %b = aten.neg(%a) : tensor<4x16xf64>
        output %b
        """,
        """
        %h = aten.mm(%x, %up) : tensor<4x8xf64>
        %all_gather = dist.all_gather(%h, axes = ["tensor"], dim = 1, block = 8) : tensor<4x16xf64>
        %a = aten.relu(%all_gather) : tensor<4x16xf64>
        %b = aten.neg(%a) : tensor<4x16xf64>
        """,
        "tensor=2",
    )


def test_annotation_that_cuts_a_whole_value_costs_no_message() -> None:
    after = assert_passes_to(
        PASSES,
        """
        input %x : tensor<4x8xf64>
        %a = aten.relu(%x) {wanted = [#dist.sharding<[{"tensor"}, {}]>]} : tensor<4x8xf64>
        %b = aten.neg(%a) : tensor<4x8xf64>
        output %b
        """,
        """
        %a = aten.relu(%x) : tensor<2x8xf64>
        %b = aten.neg(%a) : tensor<2x8xf64>
        """,
        "tensor=2",
    )
    assert shardings(after.arguments) == {"x": '[{"tensor"}, {}]'}


def test_mask_of_positions_is_made_in_shards_with_their_offset() -> None:
    assert_passes_to(
        PASSES,
        """
        input %x : tensor<4x8x8xf64> [{"data"}, {"tensor"}, {}]
        %zero = aten.full(fill_value = 0.0) : tensor<f64>
        %rows = aten.arange.start_step(start = 0) : tensor<8xi64>
        %r = aten.view(%rows) : tensor<8x1xi64>
        %cols = aten.arange.start_step(start = 0) : tensor<8xi64>
        %m = aten.le.Tensor(%r, %cols) : tensor<8x8xi1>
        %y = aten.where.self(%m, %x, %zero) : tensor<4x8x8xf64>
        output %y
        """,
        """
        %zero = aten.full(fill_value = 0.0) : tensor<f64>
        %shard_index = dist.shard_index(axes = ["tensor"]) : tensor<i64>
        %mul = aten.mul.Scalar(%shard_index, other = 4) : tensor<i64>
        %arange = aten.arange.start_step(start = 0) : tensor<4xi64>
        %rows = aten.add.Tensor(%arange, %mul) : tensor<4xi64>
        %r = aten.view(%rows) : tensor<4x1xi64>
        %cols = aten.arange.start_step(start = 0) : tensor<8xi64>
        %m = aten.le.Tensor(%r, %cols) : tensor<4x8xi1>
        %y = aten.where.self(%m, %x, %zero) : tensor<2x4x8xf64>
        """,
        "data=2,tensor=2",
    )


def test_value_that_was_sliced_for_one_use_is_not_gathered_for_another() -> None:
    # %p is whole where it is made; that %a once took a slice of it must not cut %b.
    after = assert_passes_to(
        PASSES,
        """
        input %x : tensor<8xf64> [{"tensor"}]
        input %p : tensor<8xf64> [{}]
        %a = aten.add.Tensor(%x, %p) : tensor<8xf64>
        %b = aten.neg(%p) : tensor<8xf64>
        %c = aten.relu(%b) {wanted = [#dist.sharding<[{}]>]} : tensor<8xf64>
        output %a
        output %c
        """,
        """
        %slice = dist.slice(%p, axes = ["tensor"], dim = 0, block = 4) : tensor<4xf64>
        %a = aten.add.Tensor(%x, %slice) : tensor<4xf64>
        %b = aten.neg(%p) : tensor<8xf64>
        %c = aten.relu(%b) : tensor<8xf64>
        """,
        "tensor=2",
    )
    assert after.stats().count() == 0


def test_collective_belongs_to_the_layer_and_phase_of_the_op_that_needs_it() -> None:
    text = PAIR.replace("aten.relu(%y)", 'aten.relu(%y) {layer = "act", phase = backward}')
    after = run_passes(step(text, "tensor=2"), PASSES)
    (line,) = [line for line in str(after).splitlines() if "dist.all_reduce" in line]
    assert 'layer = "act", phase = backward' in line


def test_axis_of_size_one_cuts_nothing_and_sends_nothing() -> None:
    after = run_passes(step(PAIR, "tensor=1"), PASSES)
    assert collectives(after) == []


def test_op_without_a_rule_runs_whole_with_a_note_that_names_it() -> None:
    text = """
        input %x : tensor<4x4xf64> [{"tensor"}, {}]
        %y = aten._pdist_forward(%x) : tensor<6xf64>
        output %y
    """
    before = step(text, "tensor=2")
    with pytest.warns(PassNote, match="aten._pdist_forward"):
        after = run_passes(before, PASSES)
    assert collectives(after) == [
        '%all_gather = dist.all_gather(%x, axes = ["tensor"], dim = 0, block = 2) : tensor<4x4xf64>'
    ]
    assert_same_values(before, after)


def test_program_without_a_mesh_is_refused_with_what_to_give() -> None:
    with pytest.raises(PassError) as error:
        run_passes(step(PAIR.replace('{"tensor"}', "{}")), "insert-collectives")
    assert str(error.value) == (
        "pass 'insert-collectives': the program has no mesh; give one (mesh=..., or --mesh data=2)."
    )


def test_local_program_is_not_partitioned_twice() -> None:
    once = run_passes(step(PAIR, "tensor=2"), PASSES)
    with pytest.raises(
        PassError, match="the program is local, so that its collectives are inserted"
    ):
        run_passes(once, "insert-collectives")
    with pytest.raises(PassError, match="the program is local, so that it is partitioned"):
        run_passes(once, "propagate-shardings")


def test_pass_leaves_its_argument_as_it_was() -> None:
    before = step(PAIR, "tensor=2")
    text = str(before)
    run_passes(before, PASSES)
    assert str(before) == text
    assert lines(before)[0] == "%h = aten.mm(%x, %up) : tensor<4x16xf64>"
