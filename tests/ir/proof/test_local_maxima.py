"""The proof of sums of exponentials by a shard's own maximum, and what is no such sum."""

from __future__ import annotations

import pytest

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import random_values, step

SUMS = """
    input %x : tensor<6x8xf64> [{"data"}, {"tensor"}]
    input %y : tensor<6x8xf64> [{"data"}, {"tensor"}]
    %p = aten.amax(%y, dim = [1], keepdim = true) : tensor<6x1xf64>
    %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<6x1xf64>
    %d = aten.sub.Tensor(%x, %m) : tensor<6x8xf64>
    %e = aten.exp(%d) : tensor<6x8xf64>
    %t = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<6x1xf64>
    output %t
    output other = %p
"""
"""A sum of exponentials, beside the maximum of another value."""

ONE_SUM = "\n".join(line for line in SUMS.splitlines() if "y" not in line and "%p" not in line)

FIRST_DIM = """
    input %x : tensor<8x6xf64> [{"tensor"}, {"data"}]
    %m = aten.amax(%x, dim = [0]) : tensor<6xf64>
    %d = aten.sub.Tensor(%x, %m) : tensor<8x6xf64>
    %e = aten.exp(%d) : tensor<8x6xf64>
    %t = aten.sum.dim_IntList(%e, dim = [0]) : tensor<6xf64>
    output %t
"""

ALL = """
    input %x : tensor<8x6xf64> [{"tensor"}, {"data"}]
    %m = aten.amax(%x, dim = [0, 1], keepdim = true) : tensor<1x1xf64>
    %d = aten.sub.Tensor(%x, %m) : tensor<8x6xf64>
    %e = aten.exp(%d) : tensor<8x6xf64>
    %t = aten.sum.dim_IntList(%e, dim = [0, 1], keepdim = true) : tensor<1x1xf64>
    output %t
"""

SQUARE = FIRST_DIM.replace("8x6", "8x8").replace("6xf64", "8xf64")
"""On each rank of two by two as long as it is wide: sums over either dim are of one type."""

PASSES = "preset:partition,sum-by-local-maxima"


def sums(text: str = SUMS, passes: str = PASSES) -> tuple[Program, Program]:
    """A program, and what a rank runs."""
    whole = step(text, "data=2,tensor=2")
    return whole, run_passes(whole, passes)


@pytest.mark.parametrize("text", [SUMS, FIRST_DIM, ALL])
@pytest.mark.parametrize("more", ["", ",start-collectives", ",fuse-kernels{matmul=false}"])
def test_sum_by_own_maxima_is_proved(text: str, more: str) -> None:
    whole, local = sums(text, PASSES + more)
    prove(local, against=whole)


def test_sum_by_own_maxima_in_sub_batches_is_proved() -> None:
    text = SUMS.replace("output %t", "%s = aten.sum.dim_IntList(%t, dim = []) : tensor<f64>\n"
                        "output %s").replace("output other = %p", "")  # fmt: skip
    whole, local = sums(text.replace('[{"data"}', "[{}"), f"split-batch{{n=2}},{PASSES}")
    prove(local, against=whole)


def refusal(whole: Program, local: Program) -> str:
    """The message with which a program is refused."""
    with pytest.raises(ProofError) as error:
        prove(local, against=whole)
    return str(error.value)


NEAR, AWAY = "aten.sub.Tensor(%x, %m)", "aten.sub.Tensor(%m, %all_reduce_1)"

WRONG = {
    "sum by another's maximum": [(NEAR, "aten.sub.Tensor(%x, %p)")],
    "maximum of another": [(NEAR, "aten.sub.Tensor(%x, %p)"), ("eq.Scalar(%m", "eq.Scalar(%p"),
                           (AWAY, "aten.sub.Tensor(%p, %all_reduce_1)")],
    "scaled from another's": [(AWAY, "aten.sub.Tensor(%p, %all_reduce_1)")],
    "scaled to another's": [(AWAY, "aten.sub.Tensor(%m, %all_reduce)")],
    "scaled to its own": [(AWAY, "aten.sub.Tensor(%m, %m)")],
    "scaled the other way": [(AWAY, "aten.sub.Tensor(%all_reduce_1, %m)")],
    "sum the other way": [(NEAR, "aten.sub.Tensor(%m, %x)")],
    "twice the maximum": [(NEAR, "aten.sub.Tensor(%x, %m, alpha = 2)")],
    "twice the highest": [(AWAY, "aten.sub.Tensor(%m, %all_reduce_1, alpha = 2)")],
    "no mask": [("mul.Tensor(%masked_fill", "mul.Tensor(%sum")],
    "mask of another": [("eq.Scalar(%m", "eq.Scalar(%p")],
    "mask of zeros": [("other = -inf", "other = 0.0")],
    "mask of all else": [("aten.eq.Scalar", "aten.ne.Scalar")],
    "filled with 2": [("value = 1.0", "value = 2.0")],
    "minimum": [("%m = aten.amax", "%m = aten.amin")],
    "highest over another axis": [(
        '%all_reduce, %all_reduce_1 = dist.all_reduce(%p, %m, axes = ["tensor"]',
        '%all_reduce, %all_reduce_1 = dist.all_reduce(%p, %m, axes = ["data"]')],
    "sum over another axis": [('(%t, axes = ["tensor"]', '(%t, axes = ["data"]')],
    "another power": [("%exp = aten.exp(", "%exp = aten.expm1(")],
    "scaled by another power": [("%exp_1 = aten.exp(", "%exp_1 = aten.expm1(")],
    "scaled twice": [("mul.Tensor(%masked_fill", "mul.Tensor(%exp_1")],
    "divided": [("aten.mul.Tensor", "aten.div.Tensor")],
}  # fmt: skip
"""What is replaced in the program of a rank. Of a fill nothing shows where maxima are numbers."""


NAMED = {
    "sum by another's maximum": "aten.sub.Tensor (%sub), which is op 3 ",
    "scaled to another's": "aten.sub.Tensor (%sub), which is op 9 ",
    "another power": "aten.expm1 (%exp)",
    "mask of zeros": "aten.eq.Scalar (%eq)",
    "filled with 2": "aten.masked_fill.Scalar (%masked_fill)",
    "no mask": "aten.mul.Tensor (%t)",
}
"""How messages begin."""


@pytest.mark.parametrize("name", WRONG)
def test_slip_in_a_sum_by_own_maxima_is_refused_by_name(name: str) -> None:
    whole, local = sums()
    prove(local, against=whole)
    text = str(local)
    for old, new in WRONG[name]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert refusal(whole, Program.parse(text)).startswith(NAMED.get(name, ""))


def test_sum_over_another_dim_than_the_maximum_is_refused() -> None:
    whole, local = sums(SQUARE)
    prove(local, against=whole)
    text = str(local)
    old = "aten.sum.dim_IntList(%exp, dim = [0])"
    assert old in text
    wrong = Program.parse(text.replace(old, old.replace("[0]", "[1]")))
    refusal(whole, wrong)
    both = str(wrong).replace("aten.amax(%x, dim = [0])", "aten.amax(%x, dim = [1])")
    refusal(whole, Program.parse(both))


SHARDS = """
    input %x : tensor<6x2xf64> [{}, {"data", "tensor"}]
    %all = dist.all_gather(%x, axes = ["data", "tensor"], dim = 1, block = 2) : tensor<6x8xf64>
    %y = dist.slice(%all, axes = ["tensor", "data"], dim = 1, block = 2) : tensor<6x2xf64>
    %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<6x1xf64>
    %p = aten.amax(%y, dim = [1], keepdim = true) : tensor<6x1xf64>
    %h = dist.all_reduce(%m, axes = ["data", "tensor"], op = "max") : tensor<6x1xf64>
    %d = aten.sub.Tensor(%x, %m) : tensor<6x2xf64>
    %e = aten.exp(%d) : tensor<6x2xf64>
    %s = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<6x1xf64>
    %is_lowest = aten.eq.Scalar(%m, other = -inf) : tensor<6x1xi1>
    %part = aten.masked_fill.Scalar(%s, %is_lowest, value = 1.0) : tensor<6x1xf64>
    %away = aten.sub.Tensor(%m, %h) : tensor<6x1xf64>
    %scale = aten.exp(%away) : tensor<6x1xf64>
    %t = aten.mul.Tensor(%part, %scale) : tensor<6x1xf64>
    %r = dist.all_reduce(%t, axes = ["data", "tensor"]) : tensor<6x1xf64>
    output %r
"""
"""Of a value in shards, and in those of another rank: the maxima of both are maxima of one value."""


def test_maximum_of_another_shard_of_the_same_value_is_refused() -> None:
    whole = step(ONE_SUM)
    local = step(SHARDS, "data=2,tensor=2", local=True)
    prove(local, against=whole)
    values = random_values(whole)
    (expected,) = run_reference(whole, values).values()
    for old, new in (
        ("(%m, %h)", "(%p, %h)"),
        ("(%x, %m)", "(%x, %p)"),
        ("eq.Scalar(%m", "eq.Scalar(%p"),
    ):
        wrong = step(SHARDS.replace(old, new), "data=2,tensor=2", local=True)
        (found,) = run_reference(wrong, values).values()
        assert "eq" in old or (found - expected).abs().max() > 1e-3
        refusal(whole, wrong)
    # The maxima of these shards are as good as those of others, if they are read by themselves.
    other = SHARDS.replace("(%m, axes", "(%p, axes")
    prove(step(other, "data=2,tensor=2", local=True), against=whole)
