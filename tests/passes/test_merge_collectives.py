"""merge-collectives: messages that can travel together do."""

from __future__ import annotations

from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_lines, assert_passes_to, lines, step

GRADIENTS = """
    input %x : tensor<4xf64> [{}]
    input %y : tensor<8xf64> [{}]
    %p = aten.neg(%x) : tensor<4xf64>
    %a = dist.all_reduce(%p, axes = ["data"]) {layer = "h.0", phase = backward} : tensor<4xf64>
    %q = aten.neg(%y) : tensor<8xf64>
    %b = dist.all_reduce(%q, axes = ["data"]) {layer = "h.1", phase = backward} : tensor<8xf64>
    %r = aten.exp(%y) : tensor<8xf64>
    grad x = %a
    grad y = %b
    output %r
"""


def merged(text: str, expected: str, passes: str = "merge-collectives") -> None:
    assert_passes_to(passes, text, expected, "data=2,tensor=2", local=True)


def test_gradients_become_one_message_where_the_last_of_them_stood() -> None:
    merged(
        GRADIENTS,
        """
        %p = aten.neg(%x) : tensor<4xf64>
        %q = aten.neg(%y) : tensor<8xf64>
        %a, %b = dist.all_reduce(%p, %q, axes = ["data"]) : tensor<4xf64>, tensor<8xf64>
        %r = aten.exp(%y) : tensor<8xf64>
        """,
    )


def test_merged_message_keeps_phase_and_shardings_and_has_no_layer() -> None:
    text = GRADIENTS.replace(
        "phase = backward}", "phase = backward, sharding = [#dist.sharding<[{}]>]}"
    )
    after = run_passes(step(text, "data=2,tensor=2", local=True), "merge-collectives")
    (line,) = [line for line in str(after).splitlines() if "dist.all_reduce" in line]
    assert (
        '{layer = "", phase = backward, sharding = [#dist.sharding<[{}]>, #dist.sharding<[{}]>]}'
    ) in line


def test_bucket_closes_before_it_would_exceed_its_bytes() -> None:
    before = step(GRADIENTS, "data=2,tensor=2", local=True)
    assert run_passes(before, "merge-collectives{bucket-bytes=95}") == before
    assert run_passes(before, "merge-collectives{bucket-bytes=96}").stats().count() == 1


def test_message_larger_than_a_bucket_is_sent_alone() -> None:
    before = step(GRADIENTS, "data=2,tensor=2", local=True)
    assert run_passes(before, "merge-collectives{bucket-bytes=1}") == before


def test_message_is_sent_before_its_result_is_used() -> None:
    text = """
        input %x : tensor<4xf64> [{}]
        %a = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %p = aten.neg(%a) : tensor<4xf64>
        %q = aten.exp(%x) : tensor<4xf64>
        %b = dist.all_reduce(%p, axes = ["data"]) : tensor<4xf64>
        %c = dist.all_reduce(%q, axes = ["data"]) : tensor<4xf64>
        %d = aten.add.Tensor(%b, %c) : tensor<4xf64>
        output %d
    """
    merged(
        text,
        """
        %a = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %p = aten.neg(%a) : tensor<4xf64>
        %q = aten.exp(%x) : tensor<4xf64>
        %b, %c = dist.all_reduce(%p, %q, axes = ["data"]) : tensor<4xf64>, tensor<4xf64>
        %d = aten.add.Tensor(%b, %c) : tensor<4xf64>
        """,
    )


def test_messages_of_other_axes_reductions_or_dtypes_stay_apart() -> None:
    text = """
        input %x : tensor<4xf64> [{}]
        input %y : tensor<4xf32> [{}]
        %a = dist.all_reduce(%x, axes = ["data"]) : tensor<4xf64>
        %b = dist.all_reduce(%x, axes = ["tensor"]) : tensor<4xf64>
        %c = dist.all_reduce(%x, axes = ["data", "tensor"]) : tensor<4xf64>
        %d = dist.all_reduce(%x, axes = ["data"], op = "max") : tensor<4xf64>
        %e = dist.all_reduce(%y, axes = ["data"]) : tensor<4xf32>
        grad a = %a
        grad b = %b
        grad c = %c
        grad d = %d
        grad e = %e
    """
    before = step(text, "data=2,tensor=2", local=True)
    assert run_passes(before, "merge-collectives") == before


def test_gathers_and_scatters_stay_as_they_are() -> None:
    text = """
        input %x : tensor<4xf64> [{"data"}]
        input %y : tensor<4xf64> [{"data"}]
        %a = dist.all_gather(%x, axes = ["data"], dim = 0, block = 4) : tensor<8xf64>
        %b = dist.all_gather(%y, axes = ["data"], dim = 0, block = 4) : tensor<8xf64>
        output %a
        buffer y = %b
    """
    before = step(text, "data=2", local=True)
    assert run_passes(before, "merge-collectives") == before


def test_merging_again_changes_nothing() -> None:
    once = run_passes(step(GRADIENTS, "data=2,tensor=2", local=True), "merge-collectives")
    assert run_passes(once, "merge-collectives") == once
    assert_lines(lines(run_passes(once, "dce")), "\n".join(lines(once)))
