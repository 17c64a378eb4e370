"""Gradients that will be pending over the same axes are added to each other first."""

from __future__ import annotations

import pytest

from shardweave.ir.sharding.pending_sums import add_pending_sums
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_passes_to, collectives, lines, step

GRADIENTS = """
    param %u : tensor<16x8xf64> [{"tensor"}, {}]
    param %v : tensor<16x8xf64> [{"tensor"}, {}]
    input %residual : tensor<4x8xf64>
    input %x : tensor<4x16xf64>
    %p = aten.mm(%x, %u) : tensor<4x8xf64>
    %q = aten.mm(%x, %v) : tensor<4x8xf64>
    %first = aten.add.Tensor(%residual, %p) : tensor<4x8xf64>
    %both = aten.add.Tensor(%first, %q) : tensor<4x8xf64>
    %z = aten.relu(%both) : tensor<4x8xf64>
    output %z
"""
REGROUPED = """
    %p = aten.mm(%x, %u) : tensor<4x8xf64>
    %q = aten.mm(%x, %v) : tensor<4x8xf64>
    %first = aten.add.Tensor(%p, %q) : tensor<4x8xf64>
    %both = aten.add.Tensor(%residual, %first) : tensor<4x8xf64>
    %z = aten.relu(%both) : tensor<4x8xf64>
"""


def test_two_pending_sums_are_added_before_what_is_whole() -> None:
    assert_passes_to("add-pending-sums", GRADIENTS, REGROUPED, "tensor=2")


@pytest.mark.parametrize("swapped", ["(%p, %residual)", "(%residual, %p)"])
@pytest.mark.parametrize("outer", ["(%first, %q)", "(%q, %first)"])
def test_sides_of_the_sums_do_not_matter(swapped: str, outer: str) -> None:
    text = GRADIENTS.replace("(%residual, %p)", swapped).replace("(%first, %q)", outer)
    assert_passes_to("add-pending-sums", text, REGROUPED, "tensor=2")


def test_what_was_two_reductions_is_one() -> None:
    rest = "propagate-shardings,insert-collectives"
    apart = run_passes(step(GRADIENTS, "tensor=2"), rest)
    together = run_passes(step(GRADIENTS, "tensor=2"), f"add-pending-sums,{rest}")
    assert [len(collectives(program)) for program in (apart, together)] == [2, 1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('%v : tensor<16x8xf64> [{"tensor"}, {}]', "%v : tensor<16x8xf64>", id="whole"),
        pytest.param("(%first, %q)", "(%first, %q, alpha = 2)", id="scaled"),
        pytest.param("relu(%both)", "mul.Tensor(%both, %first)", id="read twice"),
    ],
)
def test_sums_that_would_gain_nothing_stay(old: str, new: str) -> None:
    text = GRADIENTS.replace(old, new)
    program = step(text, "tensor=2")
    assert program != step(GRADIENTS, "tensor=2")
    assert not add_pending_sums(program)
    assert lines(program) == lines(step(text, "tensor=2"))


def test_sum_that_a_person_wants_in_shards_stays() -> None:
    wish = ' {wanted = [#dist.sharding<[{"tensor"}, {}]>]} :'
    text = GRADIENTS.replace("(%first, %q) :", "(%first, %q)" + wish)
    assert not add_pending_sums(step(text, "tensor=2"))


def test_program_without_a_mesh_is_refused_with_what_to_do() -> None:
    with pytest.raises(PassError, match="the program has no mesh; give one"):
        run_passes(step(GRADIENTS), "add-pending-sums")


def test_propagated_program_is_refused() -> None:
    program = run_passes(step(GRADIENTS, "tensor=2"), "propagate-shardings")
    with pytest.raises(PassError, match="before propagate-shardings"):
        run_passes(program, "add-pending-sums")


def test_third_sum_joins_the_first_two() -> None:
    third = GRADIENTS.replace(
        "%z = aten.relu(%both)",
        """%r = aten.mm(%x, %u) : tensor<4x8xf64>
    %all = aten.add.Tensor(%both, %r) : tensor<4x8xf64>
    %z = aten.relu(%all)""",
    )
    passes = "add-pending-sums,propagate-shardings,insert-collectives"
    assert len(collectives(run_passes(step(third, "tensor=2"), passes))) == 1
