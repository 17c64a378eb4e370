"""rematerialize: what each policy computes again, where it stands, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from xdsl.ir import Operation

from shardweave.backends.reference.reference import run_reference
from shardweave.benchmarks.runs.policies import POLICIES as FOREIGN
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import flops_of, is_attention
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_bytes, kept_values
from shardweave.passes.memory.rematerialize import recompute
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.tests.ir_text import assert_lines, lines, random_values, step
from shardweave.tests.passes.steps import blocks, order
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned

VALUE_BYTES = 4 * 4 * 8
"""Of any value of `blocks`."""


def recomputed(program: Program, options: str) -> Program:
    """Rematerialize, and assert that the values are the same bit for bit."""
    after = run_passes(program, f"rematerialize{{{options}}}")
    values = random_values(program)
    expected, found = run_reference(program, values), run_reference(after, values)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    return after


def backward_of(program: Program) -> list[str]:
    names = order(program)
    return names[names.index("y1.0") + 1 :]


def test_layer_runs_each_block_again_where_its_backward_pass_begins() -> None:
    after = recomputed(blocks(2, 1), "policy=layer")
    assert backward_of(after) == [
        *["Ra1.0", "Rt1.0", "Rp1.0", "Ry1.0", "dt1.0", "da1.0", "dw1.0", "dp1.0", "d1.0", "g1"],
        *["Ra0.0", "Rt0.0", "Rp0.0", "Ry0.0", "dt0.0", "da0.0", "dw0.0", "dp0.0", "d0.0", "g0"],
    ]


def test_blocks_are_run_again_one_after_another_so_that_memory_falls() -> None:
    program = blocks(6, 2)
    plain = peak_memory(program).peak_bytes
    after = recomputed(program, "policy=layer")
    # Of the four values of a block and sub-batch its result alone is kept.
    assert kept_bytes(program) == 6 * 2 * 2 * VALUE_BYTES - 2 * VALUE_BYTES
    assert kept_bytes(after) == 5 * 2 * VALUE_BYTES
    assert plain - peak_memory(after).peak_bytes > 3 * 2 * VALUE_BYTES


def test_what_the_backward_pass_makes_of_clones_is_a_part_of_it() -> None:
    """As a scale of batch norm, which is made of forward values alone."""
    spec, mesh = SPECS["cnn"], "data=2"
    after = run_passes(partitioned(spec, mesh, megatron(spec, mesh)), "rematerialize{policy=layer}")
    for op in after.ops:
        makers = [value.owner for value in op.operands if isinstance(value.owner, Operation)]
        if phase_of(op) == "forward":
            assert {phase_of(maker) for maker in makers} <= {"forward"}, op


def test_sub_batches_of_a_block_are_run_again_together() -> None:
    after = recomputed(blocks(2, 2), "policy=layer")
    clones = ["Ra1.0", "Rt1.0", "Rp1.0", "Ry1.0", "Ra1.1", "Rt1.1", "Rp1.1", "Ry1.1"]
    assert backward_of(after)[1:10] == [*clones, "dt1.0"]


def test_after_communication_keeps_what_arrived_and_what_fed_only_that_is_not_needed() -> None:
    after = recomputed(blocks(2, 1), "policy=after-communication")
    assert backward_of(after) == [
        *["Ra1.0", "Rt1.0", "dt1.0", "da1.0", "dw1.0", "dp1.0", "d1.0", "g1"],
        *["Ra0.0", "Rt0.0", "dt0.0", "da0.0", "dw0.0", "dp0.0", "d0.0", "g0"],
    ]


TWO_SEGMENTS = """
    param %w : tensor<4x4xf64>
    input %x : tensor<4x4xf64>
    %a = aten.tanh(%x) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %r = dist.all_reduce(%a, axes = ["tensor"]) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %b = aten.tanh(%r) {layer = "h.0.mlp", phase = forward} : tensor<4x4xf64>
    %c = aten.mm(%b, %w) {layer = "h.0.mlp", phase = forward} : tensor<4x4xf64>
    %gc = aten.mm(%x, %w) {layer = "h.0.mlp", phase = backward} : tensor<4x4xf64>
    %gb = aten.tanh_backward(%gc, %b) {layer = "h.0.mlp", phase = backward} : tensor<4x4xf64>
    %gr = dist.all_reduce(%gb, axes = ["tensor"]) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    %ga = aten.tanh_backward(%gr, %a) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    output %c
    grad w = %ga
"""


def test_stretches_between_communications_are_recomputed_one_by_one() -> None:
    before = step(TWO_SEGMENTS, "tensor=2", local=True)
    after = recomputed(before, "policy=after-communication")
    assert order(after)[4:] == ["Rb", "gc", "gb", "gr", "Ra", "ga"]


BETWEEN_PRODUCTS = """
    param %w : tensor<4x4xf64>
    input %x : tensor<4x4xf64>
    %n = aten.tanh(%x) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %g = dist.all_gather(%n, axes = ["tensor"], dim = 0, block = 4) {layer = "h.0", phase = forward} : tensor<8x4xf64>
    %m = aten.mm(%g, %w) {layer = "h.0", phase = forward} : tensor<8x4xf64>
    %t = aten.tanh(%m) {layer = "h.0", phase = forward} : tensor<8x4xf64>
    %p = aten.mm(%t, %w) {layer = "h.0", phase = forward} : tensor<8x4xf64>
    %r = dist.reduce_scatter(%p, axes = ["tensor"], dim = 0, block = 4) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %s = aten.sin(%r) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %y = aten.sum.dim_IntList(%s, dim = [0, 1]) {layer = "head", phase = forward} : tensor<f64>
    %ds = aten.cos(%r) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    %dr = aten.mul.Tensor(%ds, %s) {layer = "h.0", phase = backward} : tensor<4x4xf64>
    %dp = dist.all_gather(%dr, axes = ["tensor"], dim = 0, block = 4) {layer = "h.0", phase = backward} : tensor<8x4xf64>
    %dt = aten.mm(%dp, %w) {layer = "h.0", phase = backward} : tensor<8x4xf64>
    %dm = aten.tanh_backward(%dt, %t) {layer = "h.0", phase = backward} : tensor<8x4xf64>
    %dg = aten.mul.Tensor(%dm, %g) {layer = "h.0", phase = backward} : tensor<8x4xf64>
    %dw = aten.sum.dim_IntList(%dg, dim = [0], keepdim = true) {layer = "h.0", phase = backward} : tensor<1x4xf64>
    output %y
    output dw = %dw
"""


def test_after_products_keeps_products_and_sums_and_gathers_shards_again() -> None:
    before = step(BETWEEN_PRODUCTS, "tensor=2", local=True)
    # What is kept of it: m and r; before it g, t and r, and s, which the head reads.
    after = recomputed(before, "policy=after-products")
    assert order(after)[8:] == ["ds", "dr", "dp", "Rt", "Rn", "Rg", "dt", "dm", "dg", "dw"]
    assert kept_bytes(before) == (2 * 32 + 2 * 16) * 8
    assert kept_bytes(after) == (32 + 2 * 16) * 8


def test_stored_scores_are_run_again_and_no_product_of_a_weight() -> None:
    """Of T5 each of four blocks stores scores, to which it adds a bias, in its first attention. They
    are run again, and what weighs the values by them is not."""
    spec, mesh = SPECS["t5"], "tensor=2"
    program = partitioned(spec, mesh, megatron(spec, mesh))
    before = kept_bytes(program)
    recompute(program, lambda block: FOREIGN["stored-scores"])
    again = [op for op in program.ops if phase_of(op) == "recompute"]
    assert sum(flops_of(op) > 0 for op in again) == 4
    assert {op.name for op in again if flops_of(op)} == {"aten.bmm"}
    assert kept_bytes(program) < before
    assert_equals_eager(program, captured(spec))


def test_checkpoint_runs_fused_attention_again_and_keeps_what_enters_blocks_alone() -> None:
    """Of two blocks of Llama: at most what each gives, which the next is computed from again."""
    spec, mesh = SPECS["llama"], "data=1"
    keeping, whole = (partitioned(spec, mesh, megatron(spec, mesh)) for _ in range(2))
    recompute(keeping, lambda block: "layer")
    recompute(whole, lambda block: FOREIGN["checkpoint"])
    found = [
        [
            value.owner
            for value in kept_values(program)
            if isinstance(value.owner, Operation) and blocks_of(program).of_op(value.owner)
        ]
        for program in (keeping, whole)
    ]
    assert any(is_attention(op) for op in found[0])
    assert {op.name for op in found[1]} == {"aten.add.Tensor"}
    assert 0 < len(found[1]) <= len(blocks_of(whole).names) < len(found[0])
    attention = [op for op in whole.ops if is_attention(op)]
    assert [phase_of(op) for op in attention].count("recompute") == len(blocks_of(whole).names)
    assert_equals_eager(whole, captured(spec))


def test_every_second_product_of_a_weight_is_kept() -> None:
    """Of seven in a block of Llama: the second, fourth and sixth (keys, attention's output, up)."""
    spec, mesh = SPECS["llama"], "tensor=2"
    program = partitioned(spec, mesh, megatron(spec, mesh))
    before = kept_bytes(program)
    recompute(program, lambda block: FOREIGN["every-second-product"])
    again = [op for op in program.ops if phase_of(op) == "recompute" and flops_of(op)]
    layers = {str(op.properties["layer"]).strip('"').rpartition(".")[2] for op in again}
    assert layers == {"k_proj", "up_proj"}
    assert kept_bytes(program) < before
    assert_equals_eager(program, captured(spec))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_block_of_llama_keeps_what_its_products_and_its_attention_give(
    sequence_parallel: bool,
) -> None:
    spec, mesh = SPECS["llama"], "tensor=2"
    plan = megatron(spec, mesh, sequence_parallel=sequence_parallel)
    after = run_passes(partitioned(spec, mesh, plan), "rematerialize{policy=after-products}")
    again = {op.name for op in after.ops if phase_of(op) == "recompute"}
    assert {"aten.silu", "aten.rsqrt"} <= again
    assert not any(flops_of(op) for op in after.ops if phase_of(op) == "recompute")
    assert ("dist.all_gather" in again) == sequence_parallel
    # Of 8 x 16 positions, width 16, 8 heads and 32 features, halves of which are on each device:
    # q, k, v and what attention gives, its float64 log-sum-exp, gate and up; and two sums over
    # tensor, of attention's output and of what the block gives, whole or in shards.
    rows = 8 * 16
    summed = 16 // 2 if sequence_parallel else 16
    each = 4 * 16 // 2 + 8 // 2 + 2 * 32 // 2 + 2 * summed
    assert kept_of(after, "model.layers.0") == 8 * rows * each
    assert_equals_eager(after, captured(spec))


def kept_of(program: Program, block: str) -> int:
    """Bytes of what the ops of a block leave to the backward pass."""
    blocks = blocks_of(program)
    return sum(
        num_bytes(tensor_type_of(value))
        for value in kept_values(program)
        if isinstance(value.owner, Operation) and blocks.of_op(value.owner) == block
    )


def test_clones_have_a_phase_and_the_name_of_their_original() -> None:
    after = recomputed(step(TWO_SEGMENTS, "tensor=2", local=True), "policy=after-communication")
    clones = [line.strip() for line in str(after).splitlines() if "recompute" in line]
    assert clones == [
        '%b_1 = aten.tanh(%r) {layer = "h.0.mlp", phase = recompute, origin = "b"} : tensor<4x4xf64>',
        '%a_1 = aten.tanh(%x) {layer = "h.0", phase = recompute, origin = "a"} : tensor<4x4xf64>',
    ]


def test_policy_none_changes_nothing() -> None:
    program = blocks()
    assert run_passes(program, "rematerialize{policy=none}") == program


def test_what_another_block_reads_is_kept() -> None:
    text = TWO_SEGMENTS.replace(
        '%c = aten.mm(%b, %w) {layer = "h.0.mlp"', '%c = aten.mm(%b, %w) {layer = "head"'
    )
    after = recomputed(step(text, "tensor=2", local=True), "policy=after-communication")
    assert "Rb" not in order(after)


def test_views_of_what_is_kept_are_not_copied() -> None:
    text = """
        input %x : tensor<4x2xf64>
        %v = aten.view(%x) {layer = "h.0", phase = forward} : tensor<8xf64>
        %e = aten.exp(%v) {layer = "h.0", phase = forward} : tensor<8xf64>
        %w = aten.view(%e) {layer = "h.0", phase = forward} : tensor<2x4xf64>
        %g = aten.mul.Tensor(%v, %v) {layer = "h.0", phase = backward} : tensor<8xf64>
        %h = aten.exp(%w) {layer = "h.0", phase = backward} : tensor<2x4xf64>
        output %g
        grad x = %h
    """
    before = step(text, "tensor=2", local=True)
    after = run_passes(before, "rematerialize{policy=layer}")
    assert_lines(
        lines(after),
        """
        %v = aten.view(%x) : tensor<8xf64>
        %e = aten.exp(%v) : tensor<8xf64>
        %w = aten.view(%e) : tensor<2x4xf64>
        %e_1 = aten.exp(%v) : tensor<8xf64>
        %w_1 = aten.view(%e_1) : tensor<2x4xf64>
        %g = aten.mul.Tensor(%v, %v) : tensor<8xf64>
        %h = aten.exp(%w_1) : tensor<2x4xf64>
        """,
    )


def test_random_numbers_are_kept_not_drawn_again() -> None:
    text = """
        input %x : tensor<4x4xf64>
        %e = aten.exp(%x) {layer = "h.0", phase = forward} : tensor<4x4xf64>
        %d, %mask = aten.native_dropout(%e, p = 0.5, train = true) {layer = "h.0", phase = forward} : tensor<4x4xf64>, tensor<4x4xi1>
        %t = aten.tanh(%d) {layer = "h.0", phase = forward} : tensor<4x4xf64>
        %g = aten.tanh_backward(%x, %t) {layer = "h.0", phase = backward} : tensor<4x4xf64>
        %m = aten.native_dropout_backward(%g, %mask, scale = 2.0) {layer = "h.0", phase = backward} : tensor<4x4xf64>
        %n = aten.mul.Tensor(%m, %e) {layer = "h.0", phase = backward} : tensor<4x4xf64>
        output %t
        grad x = %n
    """
    after = run_passes(step(text, "tensor=2", local=True), "rematerialize{policy=layer}")
    assert order(after)[3:] == ["Re", "Rt", "g", "m", "n"]


def budget_of(after: Program) -> dict[str | None, int]:
    """By block, how many ops are computed again."""
    blocks = blocks_of(after)
    found: dict[str | None, int] = {}
    for op in after.ops:
        if phase_of(op) == "recompute":
            found[blocks.of_op(op)] = found.get(blocks.of_op(op), 0) + 1
    return found


def test_budget_recomputes_as_few_blocks_as_fit() -> None:
    program = blocks(4, 1)
    everything = kept_bytes(program)
    # Keeping all but what one or two blocks can compute again, and so on.
    for num_blocks in range(4):
        limit = everything - num_blocks * VALUE_BYTES
        after = recomputed(program, f"policy=budget bytes={limit}")
        assert kept_bytes(after) == limit
        assert budget_of(after) == {f"h.{i}": 2 for i in range(num_blocks)}


def test_budget_runs_whole_blocks_again_where_segments_are_not_enough() -> None:
    program = step(TWO_SEGMENTS, "tensor=2", local=True)
    segments = kept_bytes(run_passes(program, "rematerialize{policy=after-communication}"))
    after = recomputed(program, f"policy=budget bytes={segments - 1}")
    assert "Rr" in order(after)
    assert kept_bytes(after) == 0


def test_budget_that_is_too_small_says_how_much_is_missing() -> None:
    with pytest.raises(PassError) as error:
        run_passes(blocks(4, 1), f"rematerialize{{policy=budget bytes={VALUE_BYTES}}}")
    assert str(error.value) == (
        "pass 'rematerialize': bytes=128 is too small: after recomputing every block, 384 bytes are "
        "still kept for the backward pass, 256 more; give at least bytes=384, split the batch, or "
        "shard more."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "policy=some",
            "policy 'some' is unknown; use one of none, layer, after-communication, "
            "after-products, budget.",
        ),
        ("policy=budget", "give bytes=N with policy=budget, and with no other policy."),
        ("policy=layer bytes=100", "give bytes=N with policy=budget, and with no other policy."),
    ],
)
def test_wrong_options_are_one_line(options: str, message: str) -> None:
    with pytest.raises(PassError) as error:
        run_passes(blocks(), f"rematerialize{{{options}}}")
    assert str(error.value) == f"pass 'rematerialize': {message}"


def test_recomputing_twice_is_refused() -> None:
    with pytest.raises(PassError) as error:
        run_passes(blocks(), "rematerialize,rematerialize")
    assert str(error.value) == (
        "pass 'rematerialize': the program recomputes activations already; run rematerialize once only."
    )


def test_keys_gathered_in_two_steps_are_not_taken_for_recomputation() -> None:
    case = captured("gpt:layers=2,hidden=16,heads=2,vocab=16,seq=8,batch=4")
    plan = plan_megatron(case.program, Mesh.parse("context=2,tensor=4"), sequence_parallel=True)
    program = local_program(case.program, replace(plan, recompute="after-communication"))
    again = (op for op in program.ops if phase_of(op) == "recompute")
    assert any(isinstance(op, AtenOp) for op in again)
    assert_equals_eager(program, case)
