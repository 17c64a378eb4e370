"""Interleaving: the orders of Merak and Oases, op by op, and what joins sub-batches."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.dist import StartedOp
from shardweave.passes.pipeline import run_passes
from shardweave.planners.overlap.interleave import pass_regions, whole_regions
from shardweave.tests.ir_text import assert_same_values, step
from shardweave.tests.passes.steps import blocks, in_sub_batches, order, random_step

STARTED_PASSES = "rematerialize,delete-redundant-collectives,start-collectives"


def scheduled(schedule: str, num_blocks: int = 2, num_copies: int = 2) -> list[str]:
    program = blocks(num_blocks, num_copies)
    after = run_passes(program, f"{STARTED_PASSES},overlap-communication{{schedule={schedule}}}")
    assert_same_values(program, after)
    return order(after)


FORWARD = [
    *["a0.0", "t0.0", "p0.0", "start y0.0"],
    *["a0.1", "t0.1", "p0.1", "wait y0.0", "start y0.1"],
    *["a1.0", "t1.0", "p1.0", "wait y0.1", "start y1.0"],
    *["a1.1", "t1.1", "p1.1", "wait y1.0", "start y1.1"],
    "wait y1.1",
]
"""Oases, Algorithm 1: each line runs a segment of one sub-batch beside the other's message."""


def test_forward_pass_is_that_of_algorithm_1() -> None:
    for schedule in ("sub-batch", "cross-pass"):
        assert scheduled(schedule)[: len(FORWARD)] == FORWARD


def test_backward_pass_of_cross_pass_is_that_of_algorithm_2() -> None:
    assert scheduled("cross-pass")[len(FORWARD) :] == [
        *["Ra1.0", "Rt1.0", "dt1.0", "da1.0", "dw1.0", "dp1.0", "start d1.0"],
        *["Ra1.1", "Rt1.1", "dt1.1", "da1.1", "dw1.1", "g1", "dp1.1", "wait d1.0", "start d1.1"],
        # The next segment is recomputed beside the all-reduce of the last one's gradient.
        *["Ra0.0", "Rt0.0", "dt0.0", "da0.0", "dw0.0", "dp0.0", "wait d1.1", "start d0.0"],
        *["Ra0.1", "Rt0.1", "dt0.1", "da0.1", "dw0.1", "g0", "dp0.1", "wait d0.0", "start d0.1"],
        "wait d0.1",
    ]


def test_backward_pass_of_sub_batch_waits_before_it_recomputes() -> None:
    assert scheduled("sub-batch")[len(FORWARD) :] == [
        *["Ra1.0", "Rt1.0", "Ra1.1", "Rt1.1"],
        *["dt1.0", "da1.0", "dw1.0", "dp1.0", "start d1.0"],
        *["dt1.1", "da1.1", "dw1.1", "g1", "dp1.1", "wait d1.0", "start d1.1", "wait d1.1"],
        *["Ra0.0", "Rt0.0", "Ra0.1", "Rt0.1"],
        *["dt0.0", "da0.0", "dw0.0", "dp0.0", "start d0.0"],
        *["dt0.1", "da0.1", "dw0.1", "g0", "dp0.1", "wait d0.0", "start d0.1", "wait d0.1"],
    ]


def test_recomputed_messages_that_are_not_deleted_overlap_too() -> None:
    program = run_passes(blocks(), "rematerialize,start-collectives")
    found = order(run_passes(program, "overlap-communication{schedule=cross-pass}"))
    assert found[len(FORWARD) :][:9] == [
        *["Ra1.0", "Rt1.0", "Rp1.0", "start Ry1.0"],
        *["Ra1.1", "Rt1.1", "Rp1.1", "wait Ry1.0", "start Ry1.1"],
    ]


def test_last_segment_of_one_sub_batch_is_recomputed_before_its_message_is_waited_for() -> None:
    found = scheduled("cross-pass", num_copies=1)
    start = found.index("start d1.0")
    assert found[start : start + 5] == ["start d1.0", "Ra0.0", "Rt0.0", "wait d1.0", "dt0.0"]


@pytest.mark.parametrize("num_copies", [3, 4])
def test_more_sub_batches_take_turns_in_order(num_copies: int) -> None:
    found = scheduled("cross-pass", num_copies=num_copies)
    starts = [name.removeprefix("start ") for name in found if name.startswith("start ")]
    expected = [f"{kind}.{c}" for kind in ("y0", "y1", "d1", "d0") for c in range(num_copies)]
    assert starts == expected


def test_one_message_is_in_flight_at_a_time() -> None:
    for schedule in ("sub-batch", "cross-pass"):
        in_flight = 0
        for name in scheduled(schedule, num_copies=3):
            in_flight += name.startswith("start ") - name.startswith("wait ")
            assert in_flight <= 1


JOINED = """
    input %x.0 : @
    input %x.1 : @
    %a.0 = aten.tanh(%x.0) : @
    %a.1 = aten.tanh(%x.1) : @
    %s = aten.add.Tensor(%a.0, %a.1) : @
    %r = dist.all_reduce(%s, axes = ["data"]) : @
    %b.0 = aten.mul.Tensor(%a.0, %r) : @
    %b.1 = aten.mul.Tensor(%a.1, %r) : @
    %y.0 = dist.all_reduce(%b.0, axes = ["tensor"]) : @
    %y.1 = dist.all_reduce(%b.1, axes = ["tensor"]) : @
    output y0 = %y.0
    output y1 = %y.1
""".replace("@", "tensor<4xf64>")


def test_sum_over_sub_batches_brings_the_others_to_it() -> None:
    # As in a batch norm, the first sub-batch needs a part of the second.
    program = in_sub_batches(JOINED, "data=2,tensor=2")
    after = run_passes(program, "start-collectives,overlap-communication{schedule=cross-pass}")
    assert order(after) == [
        *["a.0", "a.1", "s", "start r", "wait r", "b.0", "start y.0"],
        *["b.1", "wait y.0", "start y.1", "wait y.1"],
    ]
    assert_same_values(program, after)


GRADIENTS = """
    input %x.0 : @
    input %x.1 : @
    %a.0 = aten.tanh(%x.0) {layer = "h", phase = backward} : @
    %a.1 = aten.tanh(%x.1) {layer = "h", phase = backward} : @
    %s = aten.add.Tensor(%a.0, %a.1) {layer = "h", phase = backward} : @
    %g = dist.all_reduce(%s, axes = ["data"]) {layer = "h", phase = backward} : @
    %b.0 = aten.exp(%a.0) {layer = "h", phase = backward} : @
    %b.1 = aten.exp(%a.1) {layer = "h", phase = backward} : @
    output b0 = %b.0
    output b1 = %b.1
    grad x = %g
""".replace("@", "tensor<4xf64>")


def test_gradient_that_sub_batches_share_is_sent_once_complete_and_waited_for_at_the_end() -> None:
    program = in_sub_batches(GRADIENTS, "data=2")
    after = run_passes(program, "start-collectives,overlap-communication{schedule=cross-pass}")
    assert order(after) == ["a.0", "b.0", "a.1", "s", "start g", "b.1", "wait g"]
    assert_same_values(program, after)


def test_wait_without_the_sub_batch_of_its_start_is_placed_too() -> None:
    program = run_passes(in_sub_batches(JOINED, "data=2,tensor=2"), "start-collectives")
    waits = [op for op in program.ops if op.name == "dist.wait"]
    for wait in waits:
        wait.properties.pop("copy", None)
    after = run_passes(program, "overlap-communication{schedule=sub-batch}")
    assert len(order(after)) == len(order(program))


def test_regions_of_a_step() -> None:
    program = run_passes(blocks(2, 1), STARTED_PASSES)
    by_pass = [
        [order_of.index(op) for op in region]
        for region in pass_regions(list(program.ops))
        for order_of in [list(program.ops)]
    ]
    names = order(program)
    assert [(names[region[0]], names[region[-1]]) for region in by_pass] == [
        ("a0.0", "wait y1.0"),
        ("Ra1.0", "Rt1.0"),
        ("dt1.0", "g1"),
        ("Ra0.0", "Rt0.0"),
        ("dt0.0", "g0"),
    ]
    forward, rest = whole_regions(list(program.ops))
    assert len(forward) == by_pass[0][-1] + 1
    assert [*forward, *rest] == list(program.ops)
    assert whole_regions(forward) == [forward]
    assert pass_regions([]) == []


@pytest.mark.parametrize("schedule", ["blocking", "sub-batch", "cross-pass"])
def test_random_steps_keep_every_op_and_every_value(schedule: str) -> None:
    for seed in range(25):
        program = run_passes(random_step(seed), "rematerialize,start-collectives")
        # The pipeline verifies: names are defined before use, and each start has one wait.
        after = run_passes(program, f"overlap-communication{{schedule={schedule}}}")
        assert sorted(order(after)) == sorted(order(program))
        assert_same_values(program, after)


def test_program_without_sub_batches_only_waits_later() -> None:
    text = """
        input %x : tensor<4xf64>
        %a = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
        %b = aten.exp(%x) : tensor<4xf64>
        %c = aten.add.Tensor(%a, %b) : tensor<4xf64>
        output %c
    """
    program = run_passes(step(text, "tensor=2", local=True), "start-collectives")
    assert sum(isinstance(op, StartedOp) for op in program.ops) == 1
    after = run_passes(program, "overlap-communication{schedule=cross-pass}")
    assert sorted(order(after)) == sorted(["start a", "wait a", "b", "c"])
    assert_same_values(program, after)
