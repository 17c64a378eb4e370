"""bucket-collectives: which gradients travel together, from where, and that values stay."""

from __future__ import annotations

import pytest
from xdsl.ir import SSAValue

from shardweave.ir.dialects.dist import DistOp, ReduceScatterOp
from shardweave.ir.program.program import Program
from shardweave.passes.messages.merge_collectives import operand_bytes
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.plan.plan import Plan
from shardweave.planners.simulate.simulate import simulate
from shardweave.tests.ir_text import assert_passes_to, assert_same_values, lines, step
from shardweave.tests.planners.small_clusters import cluster, local
from shardweave.tests.zoo import SHARDING_PASSES, SPECS, assert_equals_eager, captured

GRADIENTS = """
    input %x : tensor<4xf64>
    %a = aten.exp(%x) : tensor<4xf64>
    %b = aten.sin(%a) : tensor<4xf64>
    %c = aten.cos(%b) : tensor<4xf64>
    %ra, %rb, %rc = dist.all_reduce(%a, %b, %c, axes = ["data"]) {layer = "", phase = backward} : tensor<4xf64>, tensor<4xf64>, tensor<4xf64>
    grad a = %ra
    grad b = %rb
    grad c = %rc
"""


def bucketed(text: str, expected: str, options: str = "", mesh: str = "data=2") -> Program:
    return assert_passes_to(f"bucket-collectives{options}", text, expected, mesh, local=True)


def test_bucket_is_sent_where_its_last_gradient_is_made() -> None:
    bucketed(
        GRADIENTS,
        """
        %a = aten.exp(%x) : tensor<4xf64>
        %b = aten.sin(%a) : tensor<4xf64>
        %ra, %rb = dist.all_reduce(%a, %b, axes = ["data"]) : tensor<4xf64>, tensor<4xf64>
        %c = aten.cos(%b) : tensor<4xf64>
        %rc = dist.all_reduce(%c, axes = ["data"]) : tensor<4xf64>
        """,
        "{bytes=64}",
    )


def test_gradient_larger_than_a_bucket_is_sent_alone() -> None:
    bucketed(
        GRADIENTS,
        """
        %a = aten.exp(%x) : tensor<4xf64>
        %ra = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %b = aten.sin(%a) : tensor<4xf64>
        %rb = dist.all_reduce(%b, axes = ["data"]) : tensor<4xf64>
        %c = aten.cos(%b) : tensor<4xf64>
        %rc = dist.all_reduce(%c, axes = ["data"]) : tensor<4xf64>
        """,
        "{bytes=63}",
    )


def test_small_gradients_are_one_message_by_default() -> None:
    after = bucketed(GRADIENTS, "...")
    assert after.stats().count() == 1


def test_gradients_that_are_cast_once_they_are_summed_are_cast_behind_their_message() -> None:
    bucketed(
        """
        input %x : tensor<4xf16>
        %a = aten.exp(%x) : tensor<4xf16>
        %ra = dist.all_reduce(%a, axes = ["data"]) {layer = "", phase = backward} : tensor<4xf16>
        %ga = aten._to_copy(%ra) : tensor<4xbf16>
        %b = aten.sin(%a) : tensor<4xf16>
        %rb = dist.all_reduce(%b, axes = ["data"]) {layer = "", phase = backward} : tensor<4xf16>
        %gb = aten._to_copy(%rb) : tensor<4xbf16>
        grad a = %ga
        grad b = %gb
        """,
        """
        %a = aten.exp(%x) : tensor<4xf16>
        %b = aten.sin(%a) : tensor<4xf16>
        %ra, %rb = dist.all_reduce(%a, %b, axes = ["data"]) : tensor<4xf16>, tensor<4xf16>
        %ga = aten._to_copy(%ra) : tensor<4xbf16>
        %gb = aten._to_copy(%rb) : tensor<4xbf16>
        """,
    )


def test_result_that_an_op_reads_or_that_is_no_gradient_is_left_alone() -> None:
    text = """
        input %x : tensor<4xf64>
        %loss = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        %ra = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %m = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %b = aten.sin(%ra) : tensor<4xf64>
        %rb = dist.all_reduce(%b, axes = ["data"]) : tensor<4xf64>
        output %loss
        buffer mean = %m
        grad a = %ra
        grad b = %rb
    """
    before = step(text, "data=2", local=True)
    assert run_passes(before, "bucket-collectives") == before


def test_loss_that_was_merged_with_gradients_does_not_hold_them_back() -> None:
    bucketed(
        """
        input %x : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        %b = aten.sin(%a) : tensor<4xf64>
        %loss, %ra, %rb = dist.all_reduce(%x, %a, %b, axes = ["data"]) : tensor<4xf64>, tensor<4xf64>, tensor<4xf64>
        output %loss
        grad a = %ra
        grad b = %rb
        """,
        """
        %loss = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        %ra = dist.all_reduce(%a, axes = ["data"]) : tensor<4xf64>
        %b = aten.sin(%a) : tensor<4xf64>
        %rb = dist.all_reduce(%b, axes = ["data"]) : tensor<4xf64>
        """,
        "{bytes=32}",
    )


def test_first_bucket_is_small_and_each_later_one_twice_as_large() -> None:
    names = "abcdefg"
    ops = [f"%{n} = aten.exp(%x) : tensor<4xf64>" for n in names]
    ops += [f'%r{n} = dist.all_reduce(%{n}, axes = ["data"]) : tensor<4xf64>' for n in names]
    text = "\n".join(["input %x : tensor<4xf64>", *ops, *(f"grad {n} = %r{n}" for n in names)])
    options = "{bytes=1000 first_bytes=32}"
    after = run_passes(step(text, "data=2", local=True), f"bucket-collectives{options}")
    sizes = [len(op.operands) for op in after.ops if isinstance(op, DistOp)]
    assert sizes == [1, 2, 4]


def test_sums_that_a_function_is_given_fill_buckets_from_the_first_on() -> None:
    names = "abcdefg"
    ops = [f"input %{n} : tensor<4xf64>" for n in names]
    ops += [f'%r{n} = dist.all_reduce(%{n}, axes = ["data"]) : tensor<4xf64>' for n in names]
    text = "\n".join([*ops, *(f"grad {n} = %r{n}" for n in names)])
    options = "{bytes=160 first_bytes=32}"
    after = run_passes(step(text, "data=2", local=True), f"bucket-collectives{options}")
    sizes = [len(op.operands) for op in after.ops if isinstance(op, DistOp)]
    assert sizes == [5, 2]


def test_gradient_of_the_size_to_travel_alone_does_so() -> None:
    after = run_passes(step(GRADIENTS, "data=2", local=True), "bucket-collectives{alone_bytes=32}")
    assert [len(op.operands) for op in after.ops if isinstance(op, DistOp)] == [1, 1, 1]


def test_gradients_of_other_axes_dtypes_or_kinds_go_apart() -> None:
    text = """
        input %x : tensor<4xf64>
        input %y : tensor<4xf32>
        %a = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %b = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
        %c = dist.all_reduce(%x, axes = ["data"], op = "max") : tensor<4xf64>
        %d = dist.reduce_scatter(%x, axes = ["data"], dim = 0, block = 2) : tensor<2xf64>
        %e = dist.all_reduce(%y, axes = ["data"]) : tensor<4xf32>
        grad a = %a
        grad b = %b
        grad c = %c
        grad d = %d [{"data"}]
        grad e = %e
    """
    before = step(text, "data=2,tensor=2", local=True)
    assert lines(run_passes(before, "bucket-collectives")) == lines(before)


def test_gradient_that_is_an_argument_is_sent_first() -> None:
    bucketed(
        """
        input %x : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        %r = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        output %a
        grad x = %r
        """,
        """
        %r = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %a = aten.exp(%x) : tensor<4xf64>
        """,
    )


def test_reduce_scatters_are_joined_as_rows_of_a_matrix() -> None:
    after = bucketed(
        """
        input %x : tensor<4x2xf64>
        input %y : tensor<6xf64>
        %a = dist.reduce_scatter(%x, axes = ["data"], dim = 0, block = 2) : tensor<2x2xf64>
        %b = dist.reduce_scatter(%y, axes = ["data"], dim = 0, block = 3) : tensor<3xf64>
        grad a = %a [{"data"}, {}]
        grad b = %b [{"data"}]
        """,
        """
        %part = aten.view(%x) : tensor<2x4xf64>
        %part_1 = aten.view(%y) : tensor<2x3xf64>
        %part_2 = aten.cat([%part, %part_1], dim = 1) : tensor<2x7xf64>
        %b = dist.reduce_scatter(%part_2, axes = ["data"], dim = 0, block = 1) : tensor<1x7xf64>
        %part_3 = aten.slice.Tensor(%b, dim = 1, start = 0) : tensor<1x4xf64>
        %a = aten.view(%part_3) : tensor<2x2xf64>
        %part_4 = aten.slice.Tensor(%b, dim = 1, start = 4) : tensor<1x3xf64>
        %b_1 = aten.view(%part_4) : tensor<3xf64>
        """,
    )
    assert after.stats().count("reduce_scatter") == 1


def test_gradients_that_are_reduced_over_two_axes_travel_in_buckets_of_either() -> None:
    bucketed(
        """
        input %x : tensor<4xf64>
        input %y : tensor<6xf64>
        %a = dist.reduce_scatter(%x, axes = ["data"], dim = 0, block = 2) : tensor<2xf64>
        %b = dist.reduce_scatter(%y, axes = ["data"], dim = 0, block = 3) : tensor<3xf64>
        %ra, %rb = dist.all_reduce(%a, %b, axes = ["replica"]) : tensor<2xf64>, tensor<3xf64>
        grad a = %ra [{"data"}]
        grad b = %rb [{"data"}]
        """,
        """
        %part = aten.view(%x) : tensor<2x2xf64>
        %part_1 = aten.view(%y) : tensor<2x3xf64>
        %part_2 = aten.cat([%part, %part_1], dim = 1) : tensor<2x5xf64>
        %b = dist.reduce_scatter(%part_2, axes = ["data"], dim = 0, block = 1) : tensor<1x5xf64>
        %part_3 = aten.slice.Tensor(%b, dim = 1, start = 0) : tensor<1x2xf64>
        %a = aten.view(%part_3) : tensor<2xf64>
        %part_4 = aten.slice.Tensor(%b, dim = 1, start = 2) : tensor<1x3xf64>
        %b_1 = aten.view(%part_4) : tensor<3xf64>
        %ra, %rb = dist.all_reduce(%a, %b_1, axes = ["replica"]) : tensor<2xf64>, tensor<3xf64>
        """,
        mesh="replica=2,data=2",
    )


def test_reduce_scatters_of_other_dims_and_strided_blocks_are_joined_too() -> None:
    after = bucketed(
        """
        input %x : tensor<3x8xf64>
        input %y : tensor<8x3xf64>
        input %z : tensor<4x4x4xf64>
        %a = dist.reduce_scatter(%x, axes = ["data", "tensor"], dim = 1, block = 2) : tensor<3x2xf64>
        %b = dist.reduce_scatter(%y, axes = ["data", "tensor"], dim = 0, block = 1) : tensor<2x3xf64>
        %c = dist.reduce_scatter(%z, axes = ["data", "tensor"], dim = 1, block = 1) : tensor<4x1x4xf64>
        grad a = %a [{}, {"data", "tensor"}]
        grad b = %b [{"data":2, "tensor":1}, {}]
        grad c = %c [{}, {"data", "tensor"}, {}]
        """,
        "...",
        mesh="data=2,tensor=2",
    )
    (sent,) = [op for op in after.ops if isinstance(op, ReduceScatterOp)]
    assert operand_bytes(sent) == 8 * (24 + 24 + 64)


def test_bucket_keeps_shardings_and_phase() -> None:
    notes = 'phase = backward, sharding = [#dist.sharding<[{"data"}]>]'
    text = f"""
        input %x : tensor<4xf64>
        input %y : tensor<6xf64>
        %a = dist.reduce_scatter(%x, axes = ["data"], dim = 0, block = 2) {{layer = "h.0.a", {notes}}} : tensor<2xf64>
        %b = dist.reduce_scatter(%y, axes = ["data"], dim = 0, block = 3) {{layer = "h.0.b", {notes}}} : tensor<3xf64>
        grad a = %a [{{"data"}}]
        grad b = %b [{{"data"}}]
    """
    after = run_passes(step(text, "data=2", local=True), "bucket-collectives")
    written = [line.strip() for line in str(after).splitlines()]
    assert f'%a = aten.view(%part_3) {{layer = "h.0.a", {notes}}} : tensor<2xf64>' in written
    assert f'%b_1 = aten.view(%part_4) {{layer = "h.0.b", {notes}}} : tensor<3xf64>' in written
    (sent,) = [line for line in written if "dist.reduce_scatter" in line]
    assert sent.endswith('{layer = "h.0", phase = backward} : tensor<1x5xf64>')


def test_bucketing_again_changes_nothing() -> None:
    once = run_passes(step(GRADIENTS, "data=2", local=True), "bucket-collectives{bytes=64}")
    assert run_passes(once, "bucket-collectives{bytes=64}") == once


def gradients_of(program: Program) -> list[DistOp]:
    return [op for op in program.ops if isinstance(op, DistOp) and len(op.operands) > 1]


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("zero", [False, True], ids=["whole", "sharded"])
def test_data_parallel_model_in_buckets_equals_eager(num: int, zero: bool) -> None:
    case = captured(SPECS["gpt"])
    inputs = {"*": '[{"data"}, {}]'}
    parameters = {"h.*.mlp.fc_in.weight": '[{"data"}, {}]'} if zero else {}
    plan = ApplyPlanPass.of(Plan(inputs=inputs, parameters=parameters))
    passes = f"split-batch{{n={num}}},{SHARDING_PASSES.replace('cse', 'unroll-time-axes,cse')}"
    merged = run_passes(case.program, [plan, passes], mesh="data=2")
    after = run_passes(merged, "bucket-collectives{bytes=8192}")
    assert_equals_eager(run_passes(after, "start-collectives"), case)
    # What was one message at the end is several, none too long, sent when they are complete.
    assert len(gradients_of(after)) > len(gradients_of(merged))
    assert all(operand_bytes(op) <= 8192 for op in gradients_of(after))
    places: dict[SSAValue, int] = {
        value: i for i, op in enumerate(after.ops) for value in op.results
    }
    for op in gradients_of(after):
        assert places[op.results[0]] - max(places[value] for value in op.operands) == 1


def test_buckets_travel_beside_the_rest_of_the_backward_pass() -> None:
    # Three products of 2 ms, three messages of 4 ms: all but the first product is hidden.
    text = """
        input %x : @
        %a = aten.mm(%x, %x) : @
        %b = aten.mm(%a, %x) : @
        %c = aten.mm(%b, %x) : @
        %ra, %rb, %rc = dist.all_reduce(%a, %b, %c, axes = ["tensor"]) : @, @, @
        grad a = %ra
        grad b = %rb
        grad c = %rc
    """
    end = "start-collectives,overlap-communication{schedule=cross-pass}"
    program = local(text)
    late = run_passes(program, end)
    early = run_passes(program, f"bucket-collectives{{bytes=40000}},{end}")
    assert simulate(late, cluster()).time_s == pytest.approx(18e-3, rel=1e-3)
    assert simulate(early, cluster()).time_s == pytest.approx(14e-3, rel=1e-3)
    assert_same_values(program, early)


def test_bucket_of_no_bytes_is_refused() -> None:
    with pytest.raises(PassError) as error:
        run_passes(step(GRADIENTS, "data=2", local=True), "bucket-collectives{bytes=0}")
    assert str(error.value) == ("pass 'bucket-collectives': bytes=0; give at least 1 byte.")
