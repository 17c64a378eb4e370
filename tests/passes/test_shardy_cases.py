"""Shardy's published propagation cases in our dialect: what is sent here, and what there.

Each case has the name of a function in `propagation/test` of openxla/shardy (basic, op-priority and
aggressive propagation; read November 2026). `theirs` counts the values that its shardings make
change from one op to the next, each a message. Ours are listed, so that none is worse unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_same_values, collectives, step


@dataclass(frozen=True)
class Case:
    """A case: the mesh, the program, our messages by kind, and the number of Shardy's. worse: why
    ours are more."""

    name: str
    mesh: str
    text: str
    ours: tuple[str, ...]
    theirs: int
    worse: str = ""


CASES = (
    Case(
        "simple",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {"b"}]
        input %y : tensor<8x8xf64>
        input %w : tensor<8x16xf64>
        %s = aten.add.Tensor(%x, %y) : tensor<8x8xf64>
        %z = aten.mm(%s, %w) : tensor<8x16xf64>
        output %z
        """,
        ("all_reduce",),
        1,
    ),
    Case(
        "defer_forward_propagation_for_multi_use_ops",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        %s = aten.sin(%x) : tensor<8x8xf64>
        %p = aten.add.Tensor(%s, %s) : tensor<8x8xf64>
        %q = aten.mul.Tensor(%s, %s) : tensor<8x8xf64>
        %c = aten.cos(%p) : tensor<8x8xf64>
        %d = aten.cos(%q) : tensor<8x8xf64>
        output 0 = %c [{}, {"a"}]
        output 1 = %d [{}, {"a"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "defer_forward_propagation_for_multi_use_dynamic_slice",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        %s = aten.slice.Tensor(%x, dim = 1, start = 2, end = 4) : tensor<8x2xf64>
        %p = aten.add.Tensor(%s, %s) : tensor<8x2xf64>
        %q = aten.mul.Tensor(%s, %s) : tensor<8x2xf64>
        %m = aten.mul.Tensor(%p, %q) : tensor<8x2xf64>
        output 0 = %m [{}, {"a"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "defer_backwards_propagation_for_op_with_multi_use_operand",
        "a=2",
        """
        input %x : tensor<8x8xf64>
        %p = aten.add.Tensor(%x, %x) : tensor<8x8xf64>
        %q = aten.mul.Tensor(%x, %x) : tensor<8x8xf64>
        %s = aten.sin(%p) : tensor<8x8xf64>
        output 0 = %q [{}, {"a"}]
        output 1 = %s [{"a"}, {}]
        """,
        (),
        0,
    ),
    Case(
        "element_wise_over_dot_general",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        input %w : tensor<8x8xf64>
        %y = aten.mm(%x, %w) : tensor<8x8xf64>
        %p = aten.add.Tensor(%y, %y) : tensor<8x8xf64>
        %q = aten.add.Tensor(%p, %p) : tensor<8x8xf64>
        output 0 = %q [{}, {"a"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "element_wise_over_dot_general_flipped_op_order",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        input %w : tensor<8x8xf64>
        %p = aten.add.Tensor(%x, %x) : tensor<8x8xf64>
        %q = aten.add.Tensor(%w, %w) : tensor<8x8xf64>
        %y = aten.mm(%p, %q) : tensor<8x8xf64>
        output 0 = %y [{}, {"a"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "chained_dot_generals",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        input %w : tensor<8x8xf64>
        %y = aten.mm(%x, %w) : tensor<8x8xf64>
        %z = aten.mm(%y, %y) : tensor<8x8xf64>
        %p = aten.add.Tensor(%z, %z) : tensor<8x8xf64>
        output 0 = %p [{}, {"a"}]
        """,
        ("all_gather", "all_to_all"),
        2,
    ),
    Case(
        "pass_through_factor_higher_priority_than_reduction_factor",
        "a=2,b=2",
        """
        input %x : tensor<32x64xf64>
        input %w : tensor<64x16xf64> [{"a"}, {"b"}]
        %y = aten.mm(%x, %w) : tensor<32x16xf64>
        output 0 = %y [{"a"}, {"b"}]
        """,
        ("reduce_scatter",),
        1,
    ),
    Case(
        "broadcast_forward_higher_priority_than_backwards",
        "a=2",
        """
        input %x : tensor<32xf64> [{"a"}]
        %p = aten.view(%x) : tensor<32x1xf64>
        %q = aten.expand(%p) : tensor<32x16xf64>
        %r = aten.view(%q) : tensor<32x16x1xf64>
        %s = aten.expand(%r) : tensor<32x16x8xf64>
        output 0 = %s [{}, {"a"}, {}]
        """,
        ("all_gather",),
        1,
    ),
    Case(
        "real_conflict_across_factors_same_tensors_size",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        input %y : tensor<8x8xf64> [{}, {"a"}]
        %z = aten.add.Tensor(%x, %y) : tensor<8x8xf64>
        output %z
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "fake_conflict_closed_dims",
        "a=2,b=2,c=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {"b"}]
        input %y : tensor<8x8xf64> [{}, {"b", "c"}]
        %z = aten.add.Tensor(%x, %y) : tensor<8x8xf64>
        output %z
        """,
        (),
        1,
    ),
    Case(
        "multi_axes",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64> [{"b", "a"}, {}]
        input %y : tensor<8x8xf64> [{"b"}, {}]
        input %w : tensor<8x16xf64>
        %s = aten.add.Tensor(%x, %y) : tensor<8x8xf64>
        %z = aten.mm(%s, %w) : tensor<8x16xf64>
        output %z
        """,
        (),
        0,
    ),
    Case(
        "slice_then_concat",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64> [{"a", "b"}, {}]
        %p = aten.slice.Tensor(%x, dim = 0, start = 0, end = 1) : tensor<1x8xf64>
        %q = aten.slice.Tensor(%x, dim = 0, start = 1, end = 8) : tensor<7x8xf64>
        %z = aten.cat([%q, %p], dim = 0) : tensor<8x8xf64>
        output 0 = %z [{"a", "b"}, {}]
        """,
        ("all_gather", "all_gather"),
        3,
    ),
    Case(
        "reshape_merge_dim_major_factor_partially_sharded",
        "a=2,b=2",
        """
        input %x : tensor<4x4xf64> [{"a"}, {"b"}]
        %y = aten.view(%x) : tensor<16xf64>
        output %y
        """,
        (),
        1,
    ),
    Case(
        "reshape_split_dim_single_axis_fully_shards_major_factor",
        "a=2,b=2",
        """
        input %x : tensor<8xf64> [{"b", "a"}]
        %y = aten.view(%x) : tensor<2x4xf64>
        output %y
        """,
        (),
        0,
    ),
    Case(
        "reshape_split_and_merge_dims",
        "a=4,b=2,c=2",
        """
        input %x : tensor<8x4xf64> [{"c", "a"}, {"b"}]
        %y = aten.view(%x) : tensor<2x16xf64>
        output %y
        """,
        (),
        0,
    ),
    Case(
        "merge_dim_non_minor_most_factor_non_divisible_multiple_axes",
        "a=3,b=3",
        """
        input %x : tensor<6x4xf64> [{"a", "b"}, {}]
        %y = aten.view(%x) : tensor<24xf64>
        output %y
        """,
        (),
        1,
    ),
    Case(
        "multi_axes_some_axes_incompatible",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64> [{"a", "b"}, {}]
        input %y : tensor<8x8xf64>
        %z = aten.add.Tensor(%x, %y) : tensor<8x8xf64>
        output 0 = %z [{"a"}, {"b"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "partial_conflict_across_factors",
        "a=2,b=2",
        """
        input %x : tensor<4x8x4xf64> [{"a"}, {"b"}, {}]
        input %y : tensor<4x4x16xf64>
        %z = aten.bmm(%x, %y) : tensor<4x8x16xf64>
        output 0 = %z [{"a", "b"}, {}, {}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "fake_conflict_between_two_non_contracting_dims",
        "a=2",
        """
        input %x : tensor<16x32xf64> [{"a"}, {}]
        input %y : tensor<8x32xf64>
        %t = aten.permute(%y, dims = [1, 0]) : tensor<32x8xf64>
        %z = aten.mm(%x, %t) : tensor<16x8xf64>
        output 0 = %z [{}, {"a"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "real_conflict_across_factors_diff_tensors_size",
        "a=2,b=2,c=2",
        """
        input %x : tensor<8x4xf64> [{"a", "b"}, {}]
        input %y : tensor<4x16xf64> [{}, {"a", "c"}]
        %z = aten.mm(%x, %y) : tensor<8x16xf64>
        output %z
        """,
        ("all_gather",),
        1,
    ),
    Case(
        "unreduced_axes_block_bwd_propagation",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {"b"}]
        input %y : tensor<8x16xf64>
        %z = aten.mm(%x, %y) : tensor<8x16xf64>
        %s = aten.add.Tensor(%z, %z) : tensor<8x16xf64>
        output 0 = %s [{"a"}, {"b"}]
        """,
        ("reduce_scatter",),
        1,
    ),
    Case(
        "sharding_constraint_propagated",
        "a=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {}]
        input %y : tensor<8x8xf64>
        %z = aten.mm(%x, %y) : tensor<8x8xf64>
        %p = aten.add.Tensor(%z, %z) : tensor<8x8xf64>
        %q = aten.add.Tensor(%p, %p) {wanted = [#dist.sharding<[{}, {"a"}]>]} : tensor<8x8xf64>
        output 0 = %q [{}, {"a"}]
        """,
        ("all_to_all",),
        1,
    ),
    Case(
        "unknown_op",
        "a=2",
        """
        input %x : tensor<4x1x16xf64> [{"a"}, {}, {}]
        input %y : tensor<4x1x16xf64>
        %z = aten.cat([%x, %y, %y], dim = 1) : tensor<4x3x16xf64>
        output %z
        """,
        (),
        0,
    ),
    Case(
        "func_out_sharding",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64>
        input %w : tensor<8x16xf64>
        %z = aten.mm(%x, %w) : tensor<8x16xf64>
        output 0 = %z [{"a"}, {"b"}]
        """,
        (),
        0,
    ),
    Case(
        "sideways_propagation_if_result_is_closed_empty",
        "a=2",
        """
        input %x : tensor<8xf64> [{"a"}]
        input %y : tensor<8xf64>
        %z = aten.add.Tensor(%x, %y) : tensor<8xf64>
        output 0 = %z [{}]
        """,
        ("all_gather",),
        1,
    ),
    Case(
        "allow_partial_sideways_propagation_if_conflicting_with_result",
        "a=2,b=2",
        """
        input %x : tensor<8xf64> [{"a", "b"}]
        input %y : tensor<8xf64>
        %z = aten.add.Tensor(%x, %y) : tensor<8xf64>
        output 0 = %z [{"a"}]
        """,
        ("all_gather",),
        1,
    ),
    Case(
        "reshape_merge_dim_major_factor_fully_sharded",
        "a=2,b=2",
        """
        input %x : tensor<2x4xf64> [{"a"}, {"b"}]
        %y = aten.view(%x) : tensor<8xf64>
        output %y
        """,
        (),
        0,
    ),
    Case(
        "reshape_split_dim_only_major_most_factor_sharded",
        "a=2,b=2",
        """
        input %x : tensor<16xf64> [{"b", "a"}]
        %y = aten.view(%x) : tensor<4x4xf64>
        output %y
        """,
        (),
        0,
    ),
    Case(
        "non_minor_most_factor_non_divisible",
        "a=3",
        """
        input %x : tensor<8xf64> [{"a"}]
        %y = aten.view(%x) : tensor<2x4xf64>
        output %y
        """,
        ("all_gather",),
        1,
    ),
    Case(
        "multi_axes_conflict",
        "a=2,b=2,c=2",
        """
        input %x : tensor<8x8xf64> [{"b", "a"}, {}]
        input %y : tensor<8x8xf64> [{"b", "c"}, {}]
        input %v : tensor<8x8xf64> [{"a", "b"}, {}]
        %p = aten.add.Tensor(%x, %y) : tensor<8x8xf64>
        %q = aten.add.Tensor(%x, %v) : tensor<8x8xf64>
        output 0 = %p
        output 1 = %q
        """,
        ("all_gather", "all_gather", "all_gather"),
        4,
    ),
    Case(
        "split_constants_different_sharding",
        "a=2,b=2",
        """
        input %x : tensor<8x8xf64> [{"a"}, {"b"}]
        %c = aten.full(fill_value = 1.5) : tensor<8x8xf64>
        %p = aten.add.Tensor(%x, %c) : tensor<8x8xf64>
        %q = aten.mm(%x, %c) : tensor<8x8xf64>
        output 0 = %p
        output 1 = %q
        """,
        ("all_gather",),
        1,
    ),
    Case(
        "reshape_split_dim_single_axis_shards_both_factors",
        "a=4",
        """
        param %x : tensor<8xf64> [{"a"}]
        %y = aten.view(%x) : tensor<2x4xf64>
        output %y
        """,
        (),
        0,
    ),
    Case(
        "merge_dim_minor_most_factor_non_divisible",
        "a=2,b=3",
        """
        input %x : tensor<2x4xf64> [{"a"}, {"b"}]
        %y = aten.view(%x) : tensor<8xf64>
        output %y
        """,
        ("all_gather",),
        0,
        "padding inside a dim cannot be said",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_more_is_sent_than_by_shardy(case: Case) -> None:
    before = step(case.text, case.mesh)
    after = run_passes(before, "split-axes,propagate-shardings,insert-collectives,cse,dce")
    found = [line.split("dist.")[1].split("(")[0] for line in collectives(after)]
    messages = tuple(sorted(kind for kind in found if kind not in ("slice", "shard_index")))
    assert messages == case.ours
    assert (len(messages) > case.theirs) == bool(case.worse)
    assert_same_values(before, after)
