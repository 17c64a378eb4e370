"""delete-redundant-collectives: what dies, what is kept for it, and a budget for that."""

from __future__ import annotations

import logging

import pytest

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.ir_text import assert_same_values, step
from shardweave.tests.passes.steps import blocks, order
from shardweave.tests.zoo import SHARDING_PASSES, SPECS, captured, megatron

DELETE = "delete-redundant-collectives"


def deleted(before: Program, options: str = "") -> Program:
    after = run_passes(before, DELETE + options)
    assert_same_values(before, after)
    return after


def recomputed_messages(program: Program) -> int:
    return sum(c.count for c in program.stats().collectives if c.phase == "recompute")


def test_recomputed_all_reduce_dies_with_the_product_that_fed_it() -> None:
    before = run_passes(blocks(2, 2), "rematerialize")
    after = deleted(before)
    gone = set(order(before)) - set(order(after))
    assert {name[:2] for name in gone if name.startswith("R")} == {"Rp", "Ry"}
    assert recomputed_messages(before) == 4
    assert recomputed_messages(after) == 0


@pytest.mark.parametrize("num", [1, 2])
def test_megatron_layer_recomputes_without_all_reduces_and_row_parallel_products(num: int) -> None:
    spec = SPECS["gpt"]
    plan = ApplyPlanPass.of(megatron(spec, "tensor=2"))
    passes = SHARDING_PASSES.replace("cse", "unroll-time-axes,cse")
    split = f"split-batch{{n={num}}}"
    before = run_passes(
        captured(spec).program, [plan, f"{split},{passes},rematerialize"], mesh="tensor=2"
    )
    after = run_passes(before, DELETE)
    layers = {layer_of(op).split(".")[1] for op in after.ops if layer_of(op).startswith("h.")}
    assert recomputed_messages(before) == 2 * len(layers) * num
    assert recomputed_messages(after) == 0
    assert row_parallel_products(before) == 2 * len(layers) * num
    assert row_parallel_products(after) == 0
    kept_before, kept_after = before.stats().kept_bytes, after.stats().kept_bytes
    assert kept_before is not None
    assert kept_after is not None
    # One value of batch x seq x hidden a layer, what the attention gives: nothing in the backward
    # pass of a layer reads what its MLP gives.
    assert kept_after - kept_before == len(layers) * 8 * 16 * 16 * 8
    assert f"kept for the backward pass: {kept_after / 2**20:.3f} MiB" in str(after.stats())


def row_parallel_products(program: Program) -> int:
    return sum(
        phase_of(op) == "recompute"
        and op.name == "aten.mm"
        and layer_of(op).endswith(("attn.proj", "mlp.fc_out"))
        for op in program.ops
    )


GATHERED = """
    param %w : tensor<2x4xf64> [{"data"}, {}]
    input %x : tensor<4x4xf64>
    %whole = dist.all_gather(%w, axes = ["data"], dim = 0, block = 2) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %a = aten.mm(%x, %whole) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %b = aten.tanh(%a) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %gb = aten.tanh_backward(%x, %b) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    %gx = aten.mm(%gb, %whole) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    output %b
    grad x = %gx
"""


def test_gathered_weight_is_kept_for_the_recomputation_and_the_backward_pass() -> None:
    # AxoNN's fourth optimisation: the second gather of a weight is not sent.
    before = run_passes(step(GATHERED, "data=2", local=True), "rematerialize")
    assert order(before)[3:] == ["Rwhole", "Ra", "Rb", "gb", "gx"]
    after = deleted(before)
    assert order(after) == ["whole", "a", "b", "Ra", "Rb", "gb", "gx"]
    assert after.stats().kept_bytes == 4 * 4 * 8


def test_kind_leaves_other_collectives_as_they_are() -> None:
    program = run_passes(step(GATHERED, "data=2", local=True), "rematerialize")
    assert recomputed_messages(deleted(program, "{kind=all_gather}")) == 0
    assert recomputed_messages(deleted(program, "{kind=all_reduce}")) == 1
    with pytest.raises(
        PassError,
        match=r"kind 'gather' is not a kind of collective; use one of add_rows, all_gather, ",
    ):
        run_passes(program, DELETE + "{kind=gather}")


def test_chain_of_recomputed_messages_dies_as_a_whole() -> None:
    text = """
        input %x : tensor<4xf64>
        %a = dist.all_reduce(%x, axes = ["tensor"]) {layer = "h.0", phase = forward} : tensor<4xf64>
        %b = aten.tanh(%a) {layer = "h.0", phase = forward} : tensor<4xf64>
        %c = dist.all_reduce(%b, axes = ["tensor"], op = "max") {layer = "h.0", phase = forward} : tensor<4xf64>
        %d = aten.exp(%c) {layer = "h.0", phase = forward} : tensor<4xf64>
        %g = aten.mul.Tensor(%d, %c) {layer = "h.0", phase = backward} : tensor<4xf64>
        output %d
        grad x = %g
    """
    before = run_passes(step(text, "tensor=2", local=True), "rematerialize")
    assert order(deleted(before)) == ["a", "b", "c", "d", "Rd", "g"]


def test_message_of_another_reduction_or_operand_is_no_twin() -> None:
    text = """
        input %x : tensor<4xf64>
        input %y : tensor<4xf64>
        %a = dist.all_reduce(%x, axes = ["tensor"]) {layer = "h.0", phase = forward} : tensor<4xf64>
        %b = dist.all_reduce(%x, axes = ["tensor"], op = "max") {layer = "h.0", phase = recompute} : tensor<4xf64>
        %c = dist.all_reduce(%y, axes = ["tensor"]) {layer = "h.0", phase = recompute} : tensor<4xf64>
        %d = dist.all_reduce(%x, axes = ["data"]) {layer = "h.0", phase = recompute} : tensor<4xf64>
        output %a
        grad b = %b
        grad c = %c
        grad d = %d
    """
    before = step(text, "data=2,tensor=2", local=True)
    assert deleted(before) == before


def test_messages_of_random_numbers_are_no_twins() -> None:
    draw = "aten.native_dropout(%x, p = 0.5, train = true)"
    text = f"""
        input %x : tensor<4xf64>
        %a, %m = {draw} {{layer = "h.0", phase = forward}} : tensor<4xf64>, tensor<4xi1>
        %b, %n = {draw} {{layer = "h.0", phase = recompute}} : tensor<4xf64>, tensor<4xi1>
        %c = dist.all_reduce(%a, axes = ["tensor"]) {{layer = "h.0", phase = forward}} : tensor<4xf64>
        %d = dist.all_reduce(%b, axes = ["tensor"]) {{layer = "h.0", phase = recompute}} : tensor<4xf64>
        output %c
        grad d = %d
    """
    before = step(text, "tensor=2", local=True)
    assert run_passes(before, DELETE) == before


TWO_SIZES = """
    input %x : tensor<4xf64>
    input %y : tensor<16x4xf64>
    %a = dist.all_reduce(%x, axes = ["tensor"]) {layer = "h.0", phase = forward} : tensor<4xf64>
    %b = dist.reduce_scatter(%y, axes = ["tensor"], dim = 0, block = 4) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %s = aten.exp(%b) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %c = dist.all_reduce(%x, axes = ["tensor"]) {layer = "h.0", phase = recompute} : tensor<4xf64>
    %d = dist.reduce_scatter(%y, axes = ["tensor"], dim = 0, block = 4) {layer = "h.0", phase = recompute} : tensor<4x4xf64>
    %t = aten.mul.Tensor(%d, %c) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    output %s [{"tensor"}, {}]
    grad t = %t [{"tensor"}, {}]
"""


@pytest.mark.parametrize(
    ("budget", "left"),
    [(0, "cd"), (31, "cd"), (32, "d"), (127, "d"), (128, "c"), (159, "c"), (160, "")],
)
def test_budget_goes_to_what_saves_most_traffic_per_byte(budget: int, left: str) -> None:
    # On 4 ranks the reduce-scatter sends 3 bytes per byte of its result, the all-reduce 1.5.
    before = step(TWO_SIZES, "tensor=4", local=True)
    after = deleted(before, f"{{budget={budget}}}")
    assert "".join(name for name in order(after) if name in "cd") == left


def test_value_that_is_kept_anyhow_costs_no_budget() -> None:
    text = TWO_SIZES.replace("aten.mul.Tensor(%d, %c)", "aten.mul.Tensor(%d, %b)")
    after = deleted(step(text, "tensor=4", local=True), "{budget=0}")
    assert "d" not in order(after)


def test_message_that_nothing_needs_costs_no_budget() -> None:
    # Running a whole block again sums up its result once more, though nothing reads it.
    before = run_passes(blocks(2, 1), "rematerialize")
    assert "Ry1.0" in order(before)
    assert recomputed_messages(deleted(before, "{budget=0}")) == 0


def test_what_was_kept_and_saved_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        deleted(run_passes(blocks(2, 1), "rematerialize"))
    (record,) = caplog.records
    assert record.message == (
        "deleted 2 of 2 recomputed collectives and 2 ops that fed them: 0 bytes kept, 256 bytes "
        "less to send per rank"
    )


def test_program_without_recomputation_stays_as_it_is() -> None:
    assert run_passes(blocks(), DELETE) == blocks()


def test_forward_pass_alone_keeps_nothing_and_says_nothing_of_it() -> None:
    text = """
        input %x : tensor<4xf64>
        %a = aten.exp(%x) {layer = "h.0", phase = forward} : tensor<4xf64>
        output %a
    """
    stats = step(text).stats()
    assert stats.kept_bytes is None
    assert "kept" not in str(stats)


def test_negative_budget_is_refused() -> None:
    with pytest.raises(PassError) as error:
        run_passes(blocks(), f"{DELETE}{{budget=-1}}")
    assert str(error.value) == f"pass '{DELETE}': budget=-1 bytes; use a budget >= 0."
