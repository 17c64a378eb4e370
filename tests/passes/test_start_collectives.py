"""start-collectives: a start and a wait for each message, and what the verifier makes of them."""

from __future__ import annotations

import pytest

from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_passes_to, step

ALL_KINDS = """
    input %x : tensor<4x4xf64>
    input %y : tensor<2xf64> [{"tensor"}]
    %a, %b = dist.all_reduce(%x, %x, axes = ["tensor"]) : tensor<4x4xf64>, tensor<4x4xf64>
    %m = dist.all_reduce(%x, axes = ["tensor"], op = "max") : tensor<4x4xf64>
    %c = dist.all_gather(%y, axes = ["tensor"], dim = 0, block = 2) : tensor<4xf64>
    %d = dist.reduce_scatter(%x, axes = ["tensor"], dim = 0, block = 2) : tensor<2x4xf64>
    %e = dist.all_to_all(%d, axes = ["tensor"], dim = 1, block = 2, from_dim = 0, from_block = 2) : tensor<4x2xf64>
    %f = dist.slice(%a, axes = ["tensor"], dim = 0, block = 2) : tensor<2x4xf64>
    %g = aten.add.Tensor(%d, %f) : tensor<2x4xf64>
    output b = %b
    output m = %m
    output c = %c
    output e = %e [{}, {"tensor"}]
    output g = %g [{"tensor"}, {}]
"""


def test_each_message_is_started_and_waited_for() -> None:
    assert_passes_to(
        "start-collectives",
        ALL_KINDS,
        """
        %started, %started_1 = dist.start_all_reduce(%x, %x, axes = ["tensor"]) : tensor<4x4xf64>, tensor<4x4xf64>
        %a, %b = dist.wait(%started, %started_1) : tensor<4x4xf64>, tensor<4x4xf64>
        %started_2 = dist.start_all_reduce(%x, axes = ["tensor"], op = "max") : tensor<4x4xf64>
        %m = dist.wait(%started_2) : tensor<4x4xf64>
        %started_3 = dist.start_all_gather(%y, axes = ["tensor"], dim = 0, block = 2) : tensor<4xf64>
        %c = dist.wait(%started_3) : tensor<4xf64>
        %started_4 = dist.start_reduce_scatter(%x, axes = ["tensor"], dim = 0, block = 2) : tensor<2x4xf64>
        %d = dist.wait(%started_4) : tensor<2x4xf64>
        %started_5 = dist.start_all_to_all(%d, axes = ["tensor"], dim = 1, block = 2, from_dim = 0, from_block = 2) : tensor<4x2xf64>
        %e = dist.wait(%started_5) : tensor<4x2xf64>
        %f = dist.slice(%a, axes = ["tensor"], dim = 0, block = 2) : tensor<2x4xf64>
        %g = aten.add.Tensor(%d, %f) : tensor<2x4xf64>
        """,
        "tensor=2",
        local=True,
    )


def test_start_and_wait_have_the_annotations_of_the_message() -> None:
    text = """
        input %x : tensor<4xf64> [{}], unreduced = ["tensor"]
        %a = dist.all_reduce(%x, axes = ["tensor"]) {layer = "h.0", phase = recompute, origin = "b", sharding = [#dist.sharding<[{}]>]} : tensor<4xf64>
        output %a
    """
    after = run_passes(step(text, "tensor=2", local=True), "start-collectives")
    notes = (
        '{layer = "h.0", phase = recompute, origin = "b", sharding = [#dist.sharding<[{}]>]}'
        " : tensor<4xf64>"
    )
    written = [line.strip() for line in str(after).splitlines() if "dist." in line][2:]
    assert written == [
        f'%started = dist.start_all_reduce(%x, axes = ["tensor"]) {notes}',
        f"%a = dist.wait(%started) {notes}",
    ]


def test_starting_twice_changes_nothing() -> None:
    once = run_passes(step(ALL_KINDS, "tensor=2", local=True), "start-collectives")
    assert run_passes(once, "start-collectives") == once


def test_stats_count_started_messages_like_blocking_ones() -> None:
    before = step(ALL_KINDS, "tensor=2", local=True)
    assert run_passes(before, "start-collectives").stats().collectives == before.stats().collectives


def test_sub_batches_that_are_not_written_out_are_refused() -> None:
    text = """
        input %x : tensor<4x4xf64>
        %y = aten.relu(%x) : tensor<4x4xf64>
        output %y
    """
    passes = "split-batch,propagate-shardings,insert-collectives,start-collectives"
    with pytest.raises(PassError) as error:
        run_passes(step(text), passes)
    assert str(error.value) == (
        "pass 'start-collectives': the program still has the time axes ['batch'], whose sub-batches "
        "are not unrolled; run unroll-time-axes first."
    )


STARTED = """
    input %x : tensor<4xf64>
    %f = dist.start_all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
    %a = dist.wait(%f) : tensor<4xf64>
    output %a
"""

ADVICE = (
    "expected one wait that reads all its results and nothing else that reads them; add "
    "%done = dist.wait(%started) and use %done."
)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "    %a = dist.wait(%f) : tensor<4xf64>\n    output %a",
            "    output %f",
            f"dist.start_all_reduce (%f): found 0 dist.wait among 1 users, {ADVICE}",
        ),
        (
            "    %a = dist.wait(%f) : tensor<4xf64>\n    output %a",
            "    output %x",
            f"dist.start_all_reduce (%f): found 0 dist.wait among 0 users, {ADVICE}",
        ),
        (
            "    output %a",
            "    %b = dist.wait(%f) : tensor<4xf64>\n    output %b",
            f"dist.start_all_reduce (%f): found 2 dist.wait among 2 users, {ADVICE}",
        ),
        (
            "    output %a",
            "    %b = aten.relu(%f) : tensor<4xf64>\n    output %b",
            f"dist.start_all_reduce (%f): found 1 dist.wait among 2 users, {ADVICE}",
        ),
        (
            "dist.wait(%f)",
            "dist.wait(%x)",
            f"dist.start_all_reduce (%f): found 0 dist.wait among 0 users, {ADVICE}",
        ),
    ],
    ids=["deleted", "unused", "twice", "too early", "of something else"],
)
def test_wrong_wait_in_the_text_is_named_with_what_to_do(old: str, new: str, problem: str) -> None:
    assert verify(step(STARTED, "tensor=2", local=True)) == []
    assert old in STARTED
    assert verify(step(STARTED.replace(old, new), "tensor=2", local=True))[0] == problem


def test_wait_for_half_of_a_message_is_refused() -> None:
    text = """
        input %x : tensor<4xf64>
        %f, %g = dist.start_all_reduce(%x, %x, axes = ["tensor"]) : tensor<4xf64>, tensor<4xf64>
        %a = dist.wait(%f) : tensor<4xf64>
        output %a
    """
    (problem,) = verify(step(text, "tensor=2", local=True))
    assert problem == f"dist.start_all_reduce (%f): found 1 dist.wait among 1 users, {ADVICE}"
