<<<<<<< HEAD
"""Pending sums are added to each other before they are added to what is whole."""
=======
"""Gradients that will be pending over the same axes are added to each other first."""
>>>>>>> speed

from __future__ import annotations

import pytest

from shardweave.ir.sharding.pending_sums import add_pending_sums
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_passes_to, collectives, lines, step

<<<<<<< HEAD
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
=======
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
>>>>>>> speed


@pytest.mark.parametrize(
    ("old", "new"),
    [
<<<<<<< HEAD
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
    assert add_pending_sums(program) is False
    assert lines(program) == before


def test_propagated_program_is_refused_with_what_to_do() -> None:
    program = run_passes(step(GRADIENTS, "tensor=2"), "propagate-shardings")
    with pytest.raises(PassError, match="run add-pending-sums before propagate-shardings"):
        run_passes(program, "add-pending-sums")


def test_program_without_a_mesh_is_refused() -> None:
    with pytest.raises(PassError, match="the program has no mesh"):
        run_passes(step(GRADIENTS), "add-pending-sums")
=======
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
>>>>>>> speed
