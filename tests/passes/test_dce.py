"""dce: what nobody uses goes, and all that only fed it."""

from __future__ import annotations

from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_passes_to, lines, step


def test_op_without_uses_goes_with_what_only_fed_it() -> None:
    assert_passes_to(
        "dce",
        """
        input %x : tensor<4xf64>
        %a = aten.neg(%x) : tensor<4xf64>
        %b = aten.relu(%a) : tensor<4xf64>
        %c = aten.relu(%b) : tensor<4xf64>
        %d = aten.exp(%a) : tensor<4xf64>
        output %d
        """,
        """
        %a = aten.neg(%x) : tensor<4xf64>
        %d = aten.exp(%a) : tensor<4xf64>
        """,
    )


def test_op_of_which_one_result_is_used_stays() -> None:
    text = """
        input %x : tensor<4x4xf64>
        %a, %i = aten.max.dim(%x, dim = 1) : tensor<4xf64>, tensor<4xi64>
        output %i
    """
    before = step(text)
    assert run_passes(before, "dce") == before


def test_unused_collective_is_not_sent() -> None:
    assert_passes_to(
        "dce",
        """
        input %x : tensor<4xf64> [{}]
        %n = aten.neg(%x) : tensor<4xf64>
        %a = dist.all_reduce(%n, axes = ["tensor"]) : tensor<4xf64>
        %b = aten.relu(%x) : tensor<4xf64>
        output %b
        """,
        "%b = aten.relu(%x) : tensor<4xf64>",
        "tensor=2",
        local=True,
    )


def test_argument_that_nothing_reads_stays_an_argument() -> None:
    text = """
        param %w : tensor<2xf64>
        input %x : tensor<4xf64>
        %a = aten.neg(%w) : tensor<2xf64>
        output %x
    """
    after = run_passes(step(text), "dce")
    assert [slot.name for slot in after.arguments] == ["w", "x"]
    assert lines(after) == ["func.return %x : tensor<4xf64>"]
