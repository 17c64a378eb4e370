"""cse: equal ops become one, and ops that only look equal do not."""

from __future__ import annotations

from shardweave.passes.pipeline import run_passes
from shardweave.passes.prepare.cse import CsePass
from shardweave.tests.ir_text import assert_lines, assert_passes_to, lines, step


def test_equal_ops_become_one_and_so_do_their_users() -> None:
    assert_passes_to(
        "cse",
        """
        input %x : tensor<4xf64>
        %a = aten.neg(%x) : tensor<4xf64>
        %b = aten.neg(%x) : tensor<4xf64>
        %c = aten.relu(%a) : tensor<4xf64>
        %d = aten.relu(%b) : tensor<4xf64>
        %e = aten.add.Tensor(%c, %d) : tensor<4xf64>
        output %e
        """,
        """
        %a = aten.neg(%x) : tensor<4xf64>
        %c = aten.relu(%a) : tensor<4xf64>
        %e = aten.add.Tensor(%c, %c) : tensor<4xf64>
        """,
    )


def test_layer_phase_and_sharding_do_not_make_ops_different() -> None:
    assert_passes_to(
        "cse",
        """
        input %x : tensor<4xf64>
        %a = aten.neg(%x) {layer = "h.0", phase = forward} : tensor<4xf64>
        %b = aten.neg(%x) {layer = "h.1", phase = backward, sharding = [#dist.sharding<[{}]>]} : tensor<4xf64>
        %c = aten.add.Tensor(%a, %b) : tensor<4xf64>
        output %c
        """,
        """
        %a = aten.neg(%x) : tensor<4xf64>
        %c = aten.add.Tensor(%a, %a) : tensor<4xf64>
        """,
        "tensor=2",
    )


def test_ops_of_other_arguments_operands_or_types_stay_apart() -> None:
    text = """
        input %x : tensor<4xf64>
        input %y : tensor<4xf64>
        %a = aten.add.Scalar(%x, other = 1) : tensor<4xf64>
        %b = aten.add.Scalar(%x, other = 1.0) : tensor<4xf64>
        %c = aten.add.Scalar(%y, other = 1) : tensor<4xf64>
        %d = aten._to_copy(%x) : tensor<4xf32>
        %e = aten._to_copy(%x) : tensor<4xf16>
        %f = aten.sub.Tensor(%x, %y) : tensor<4xf64>
        %g = aten.sub.Tensor(%y, %x) : tensor<4xf64>
        output %g
    """
    before = step(text)
    assert run_passes(before, "cse") == before


def test_recomputed_op_is_not_merged_with_its_original() -> None:
    text = """
        input %x : tensor<4xf64>
        %a = aten.relu(%x) {layer = "h", phase = forward} : tensor<4xf64>
        %b = aten.relu(%x) {layer = "h", phase = recompute} : tensor<4xf64>
        %c = aten.relu(%x) {layer = "h", phase = recompute} : tensor<4xf64>
        %d = aten.add.Tensor(%a, %b) : tensor<4xf64>
        %e = aten.add.Tensor(%d, %c) : tensor<4xf64>
        output %e
    """
    assert_lines(
        lines(run_passes(step(text), "cse")),
        """
        %a = aten.relu(%x) : tensor<4xf64>
        %b = aten.relu(%x) : tensor<4xf64>
        %d = aten.add.Tensor(%a, %b) : tensor<4xf64>
        %e = aten.add.Tensor(%d, %b) : tensor<4xf64>
        """,
    )


def test_two_random_ops_are_never_merged() -> None:
    text = """
        input %x : tensor<4xf64>
        %a = aten.rand_like(%x) : tensor<4xf64>
        %b = aten.rand_like(%x) : tensor<4xf64>
        %c = aten.sub.Tensor(%a, %b) : tensor<4xf64>
        output %c
    """
    before = step(text)
    assert run_passes(before, "cse") == before


def test_equal_collectives_are_sent_once() -> None:
    assert_passes_to(
        "cse",
        """
        input %x : tensor<4xf64> [{}]
        %a = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
        %b = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
        %m = dist.all_reduce(%x, axes = ["tensor"], op = "max") : tensor<4xf64>
        %c = aten.add.Tensor(%a, %b) : tensor<4xf64>
        %d = aten.add.Tensor(%c, %m) : tensor<4xf64>
        output %d
        """,
        """
        %a = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
        %m = dist.all_reduce(%x, axes = ["tensor"], op = "max") : tensor<4xf64>
        %c = aten.add.Tensor(%a, %a) : tensor<4xf64>
        %d = aten.add.Tensor(%c, %m) : tensor<4xf64>
        """,
        "tensor=2",
        local=True,
    )


def test_op_of_several_results_is_merged_result_by_result() -> None:
    assert_passes_to(
        "cse",
        """
        input %x : tensor<4x4xf64>
        %a, %i = aten.max.dim(%x, dim = 1) : tensor<4xf64>, tensor<4xi64>
        %b, %j = aten.max.dim(%x, dim = 1) : tensor<4xf64>, tensor<4xi64>
        output %a
        buffer n = %j
        """,
        """
        %a, %i = aten.max.dim(%x, dim = 1) : tensor<4xf64>, tensor<4xi64>
        func.return %a, %i : tensor<4xf64>, tensor<4xi64>
        """,
    )


def test_ops_whose_results_are_sharded_along_other_dims_stay_two() -> None:
    text = """
        input %x : tensor<1x1xf64>
        %a = aten.neg(%x) {sharding = [#dist.sharding<[{"micro"}, {}]>]} : tensor<1x1xf64>
        %b = aten.neg(%x) {sharding = [#dist.sharding<[{}, {"micro"}]>]} : tensor<1x1xf64>
        %c = aten.neg(%x) {sharding = [#dist.sharding<[{}, {"micro"}]>]} : tensor<1x1xf64>
        %d = aten.add.Tensor(%a, %b) : tensor<1x1xf64>
        %e = aten.add.Tensor(%d, %c) : tensor<1x1xf64>
        output %e
        """
    CsePass().run(program := step(text))
    assert sum(op.name == "aten.neg" for op in program.ops) == 2
