"""Pending sums are added to each other before they are added to what is whole."""

from __future__ import annotations

import pytest

from shardweave.passes.pipeline import PassError, run_passes
from shardweave.passes.prepare.add_pending_sums import AddPendingSumsPass
from shardweave.tests.ir_text import assert_passes_to, collectives, lines, step

PASSES = "add-pending-sums,propagate-shardings,insert-collectives"
GRADIENTS = """
    param %q : tensor<8x8xf64> [{"tensor"}, {}]
    param %k : tensor<8x8xf64> [{"tensor"}, {}]
    input %r : tensor<4x8xf64>
    input %g : tensor<4x8xf64>
    %a = aten.mm(%g, %q) : tensor<4x8xf64>
    %s = aten.add.Tensor(%r, %a) : tensor<4x8xf64>
    %b = aten.mm(%g, %k) : tensor<4x8xf64>
    %t = aten.add.Tensor(%s, %b) : tensor<4x8xf64>
    output %t
"""


def test_two_sums_over_the_same_axis_are_reduced_once() -> None:
    local = assert_passes_to(
        PASSES,
        GRADIENTS,
        """
        %a = aten.mm(%g, %q) : tensor<4x8xf64>
        %b = aten.mm(%g, %k) : tensor<4x8xf64>
        %s = aten.add.Tensor(%a, %b) : tensor<4x8xf64>
        %all_reduce = dist.all_reduce(%s, axes = ["tensor"]) : tensor<4x8xf64>
        %t = aten.add.Tensor(%r, %all_reduce) : tensor<4x8xf64>
        """,
        "tensor=2",
    )
    without = run_passes(step(GRADIENTS, "tensor=2"), PASSES.removeprefix("add-pending-sums,"))
    assert sum("all_reduce" in line for line in collectives(without)) == 2
    assert sum("all_reduce" in line for line in collectives(local)) == 1


def test_third_sum_joins_the_first_two() -> None:
    third = GRADIENTS.replace(
        "output %t",
        """%c = aten.mm(%g, %q) : tensor<4x8xf64>
    %u = aten.add.Tensor(%t, %c) : tensor<4x8xf64>
    output %u""",
    )
    local = run_passes(step(third, "tensor=2"), PASSES)
    assert sum("all_reduce" in line for line in collectives(local)) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('%k : tensor<8x8xf64> [{"tensor"}, {}]', "%k : tensor<8x8xf64> [{}, {}]"),
        ("%t = aten.add.Tensor(%s, %b)", "%t = aten.add.Tensor(%s, %b, alpha = 2)"),
        ("output %t", "output %t\n    output 1 = %s"),
    ],
    ids=["one is whole", "scaled", "the first sum has another use"],
)
def test_what_does_not_fit_the_pattern_stays(old: str, new: str) -> None:
    text = GRADIENTS.replace(old, new)
    assert text != GRADIENTS
    program = step(text, "tensor=2")
    before = lines(program)
    AddPendingSumsPass().run(program)
    assert lines(program) == before


def test_propagated_program_is_refused_with_what_to_do() -> None:
    program = run_passes(step(GRADIENTS, "tensor=2"), "propagate-shardings")
    with pytest.raises(PassError, match="run add-pending-sums before propagate-shardings"):
        run_passes(program, "add-pending-sums")


def test_program_without_a_mesh_is_refused() -> None:
    with pytest.raises(PassError, match="the program has no mesh"):
        run_passes(step(GRADIENTS), "add-pending-sums")
