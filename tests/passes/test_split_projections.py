"""split-projections: each part of a fused projection by a linear map of its own."""

from __future__ import annotations

import pytest

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.program.program import PART, PARTS, Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.tests.ir_text import assert_same_values, lines, step

FORWARD = '{layer = "a", phase = forward}'
BACKWARD = '{layer = "a", phase = backward}'
HEAD = f"""
    param %w : tensor<4x18xf64>
    param %b : tensor<18xf64>
    input %x : tensor<5x4xf64>
    input %g0 : tensor<5x6xf64>
    input %g1 : tensor<5x6xf64>
    input %g2 : tensor<5x6xf64>
    %y = aten.addmm(%b, %x, %w) {FORWARD} : tensor<5x18xf64>
"""
SLICES = f"""{HEAD}
    %q = aten.slice.Tensor(%y, dim = 1, start = 0) {FORWARD} : tensor<5x6xf64>
    %k = aten.slice.Tensor(%y, dim = 1, start = 6) {FORWARD} : tensor<5x6xf64>
    %v = aten.slice.Tensor(%y, dim = 1, start = 12) {FORWARD} : tensor<5x6xf64>
    %s0 = aten.slice_backward(%g0, dim = 1, start = 0, step = 1) {BACKWARD} : tensor<5x18xf64>
    %s1 = aten.slice_backward(%g1, dim = 1, start = 6, step = 1) {BACKWARD} : tensor<5x18xf64>
    %s2 = aten.slice_backward(%g2, dim = 1, start = 12, step = 1) {BACKWARD} : tensor<5x18xf64>
    %s01 = aten.add.Tensor(%s0, %s1) {BACKWARD} : tensor<5x18xf64>
    %g = aten.add.Tensor(%s01, %s2) {BACKWARD} : tensor<5x18xf64>
"""
UNBOUND = f"""{HEAD}
    %view = aten.view(%y) {FORWARD} : tensor<5x3x6xf64>
    %permuted = aten.permute(%view, dims = [1, 0, 2]) {FORWARD} : tensor<3x5x6xf64>
    %q = aten.select.int(%permuted, dim = 0, index = 0) {FORWARD} : tensor<5x6xf64>
    %k = aten.select.int(%permuted, dim = 0, index = 1) {FORWARD} : tensor<5x6xf64>
    %v = aten.select.int(%permuted, dim = 0, index = 2) {FORWARD} : tensor<5x6xf64>
    %s0 = aten.view(%g0) {BACKWARD} : tensor<1x5x6xf64>
    %s1 = aten.view(%g1) {BACKWARD} : tensor<1x5x6xf64>
    %s2 = aten.view(%g2) {BACKWARD} : tensor<1x5x6xf64>
    %cat = aten.cat([%s0, %s1, %s2]) {BACKWARD} : tensor<3x5x6xf64>
    %back = aten.permute(%cat, dims = [1, 0, 2]) {BACKWARD} : tensor<5x3x6xf64>
    %g = aten.view(%back) {BACKWARD} : tensor<5x18xf64>
"""
TAIL = f"""
    %qk = aten.mul.Tensor(%q, %k) {FORWARD} : tensor<5x6xf64>
    %out = aten.mul.Tensor(%qk, %v) {FORWARD} : tensor<5x6xf64>
    %wt = aten.permute(%w, dims = [1, 0]) {BACKWARD} : tensor<18x4xf64>
    %dx = aten.mm(%g, %wt) {BACKWARD} : tensor<5x4xf64>
    %xt = aten.permute(%x, dims = [1, 0]) {BACKWARD} : tensor<4x5xf64>
    %dw = aten.mm(%xt, %g) {BACKWARD} : tensor<4x18xf64>
    %sum = aten.sum.dim_IntList(%g, dim = [0], keepdim = true) {BACKWARD} : tensor<1x18xf64>
    %db = aten.view(%sum) {BACKWARD} : tensor<18xf64>
    output %out
    output dx = %dx
    grad w = %dw
    grad b = %db
"""


def marked(text: str, parts: int = 3, wanted: str = "", mesh: str = "") -> Program:
    """The program of a text whose weight %w is said to be of so many parts."""
    program = step(text, mesh)
    program.set_argument_attributes(PARTS, {0: to_attribute(parts)})
    if wanted:
        program.set_argument_attributes(PART, {0: ShardingAttr.parse_text(wanted)})
    return program


@pytest.mark.parametrize("text", [SLICES, UNBOUND], ids=["slices", "unbound"])
def test_every_product_is_one_of_a_part(text: str) -> None:
    program = marked(text + TAIL)
    after = run_passes(program, "split-projections")
    assert_same_values(program, after)
    found = lines(after)
    products = [line for line in found if "mm(" in line]
    assert len(products) == 9  # three parts of outputs, of the input's and of the weight's gradient
    assert {line.rpartition("tensor<")[2] for line in products} == {
        "5x6xf64>",
        "5x4xf64>",
        "4x6xf64>",
    }
    # Nothing is as wide as all parts but gradients, put together at the end.
    wide = [line for line in found if "18xf64> " in line or line.endswith("18xf64>")]
    assert [line.split(" = ")[1].split("(")[0] for line in wide[:-1]] == ["aten.cat"] * 2
    assert "dist.parts" not in str(after)


def test_each_part_is_wanted_in_the_shards_that_the_weight_names() -> None:
    # Three heads of two features on two devices: two heads and one.
    program = marked(SLICES + TAIL, wanted='[{}, {"tensor":4}]', mesh="tensor=2")
    after = run_passes(program, "split-projections")
    slices = [line for line in lines(after, shardings=True) if "slice.Tensor(%w" in line]
    assert len(slices) == 6
    assert all('<[{}, {"tensor":4}' in line for line in slices)
    local = run_passes(after, "propagate-shardings,insert-collectives,cse,dce")
    products = [line for line in lines(local) if "addmm(" in line]
    assert [line.rpartition(" : ")[2] for line in products] == ["tensor<5x4xf64>"] * 3
    assert_same_values(program, local)


@pytest.mark.parametrize(
    ("text", "parts", "message"),
    [
        (SLICES + TAIL, 4, "no linear map of the forward pass reads it"),
        (
            SLICES.replace("%q = aten.slice.Tensor(%y", "%z = aten.neg(%y) : tensor<5x18xf64>\n"
                           "%q = aten.slice.Tensor(%z") + TAIL,
            3,
            r"parameter 'w' .* the outputs of aten.addmm \(%y\) .* not only read in equal parts",
        ),
    ],
)  # fmt: skip
def test_what_is_not_made_of_such_parts_is_refused(text: str, parts: int, message: str) -> None:
    with pytest.raises(PassError, match=message):
        run_passes(marked(text, parts), "split-projections")


def test_shards_that_a_part_cannot_be_in_are_refused() -> None:
    program = marked(SLICES + TAIL, wanted='[{}, {"tensor":6}]', mesh="tensor=2")
    with pytest.raises(PassError, match="parameter 'w' cannot be split into 3 projections"):
        run_passes(program, "split-projections")


def test_a_propagated_program_is_refused() -> None:
    program = run_passes(marked(SLICES + TAIL, mesh="tensor=2"), "propagate-shardings")
    with pytest.raises(PassError, match="run split-projections before propagate-shardings"):
        run_passes(program, "split-projections")


def test_a_program_without_such_weights_stays() -> None:
    program = step(SLICES + TAIL)
    assert run_passes(program, "split-projections") == program
