"""sum-by-local-maxima: a softmax over a cut dim reads each shard once before its message."""

from __future__ import annotations

import math

import pytest
import torch

from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.annotations import sharding_attrs_of
from shardweave.ir.dialects.dist import AllReduceOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import assert_lines, lines, step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned

PASS = "sum-by-local-maxima"
INF, NAN = math.inf, math.nan

SUMS = """
    input %x : tensor<6x8xf64> [{}, {"tensor"}]
    %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<6x1xf64>
    %d = aten.sub.Tensor(%x, %m) : tensor<6x8xf64>
    %e = aten.exp(%d) : tensor<6x8xf64>
    %t = aten.sum.dim_IntList(%e, dim = [1], keepdim = true) : tensor<6x1xf64>
    output %t
"""


def local(text: str, passes: str = "") -> Program:
    """The program of each of two ranks."""
    return run_passes(step(text, "tensor=2"), f"preset:partition{passes}")


def test_sum_is_taken_before_the_message_and_scaled_after_it() -> None:
    assert_lines(
        lines(run_passes(local(SUMS), PASS)),
        """
        %m = aten.amax(%x, dim = [1], keepdim = true) : tensor<6x1xf64>
        %sub = aten.sub.Tensor(%x, %m) : tensor<6x4xf64>
        %exp = aten.exp(%sub) : tensor<6x4xf64>
        %sum = aten.sum.dim_IntList(%exp, dim = [1], keepdim = true) : tensor<6x1xf64>
        %eq = aten.eq.Scalar(%m, other = -inf) : tensor<6x1xi1>
        %masked_fill = aten.masked_fill.Scalar(%sum, %eq, value = 1.0) : tensor<6x1xf64>
        %all_reduce = dist.all_reduce(%m, axes = ["tensor"], op = "max") : tensor<6x1xf64>
        %sub_1 = aten.sub.Tensor(%m, %all_reduce) : tensor<6x1xf64>
        %exp_1 = aten.exp(%sub_1) : tensor<6x1xf64>
        %t = aten.mul.Tensor(%masked_fill, %exp_1) : tensor<6x1xf64>
        %all_reduce_1 = dist.all_reduce(%t, axes = ["tensor"]) : tensor<6x1xf64>
        """,
    )


def test_scaled_sum_keeps_the_sharding_of_the_sum() -> None:
    before, after = local(SUMS), run_passes(local(SUMS), PASS)
    (total,) = (op for op in before.ops if op.name == "aten.sum.dim_IntList")
    (scaled,) = (op for op in after.ops if op.name == "aten.mul.Tensor")
    assert sharding_attrs_of(scaled) == sharding_attrs_of(total) is not None


@pytest.mark.parametrize("started", ["", ",start-collectives"], ids=["blocking", "started"])
def test_sums_are_eager_s_with_infinities_and_nan_in_a_shard_or_in_all(started: str) -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    x[0, 4:] = -INF  # nothing but that in one shard
    x[1] = -INF
    x[2, 1] = INF
    x[3, 6] = NAN
    x[4, :4] -= 2000.0
    x[5, 2] = -INF
    program = local(SUMS, started)
    rewritten = run_passes(program, PASS)
    assert lines(rewritten) != lines(program)
    expected = (x - x.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
    assert expected.isnan().flatten().tolist() == [False, True, True, True, False, False]
    for one in (program, rewritten):
        (found,) = run_reference(one, {("input", "x"): x}).values()
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"tensor"}]', "{}]"),
        ("(%d)", "(%x)"),
        ("output %t", "output %t\n    grad e = %e"),
        (
            "keepdim = true) : tensor<6x1xf64>\n    output",
            "keepdim = false) : tensor<6xf64>\n    output",
        ),
    ],
    ids=["whole rows", "no distance", "powers are read", "other shape"],
)
def test_what_is_no_such_sum_stays(old: str, new: str) -> None:
    text = SUMS.replace(old, new)
    assert text != SUMS
    program = local(text)
    assert run_passes(program, PASS) == program


def test_loss_over_a_cut_vocabulary_equals_eager() -> None:
    plan = megatron(SPECS["llama"], "data=2,tensor=2")
    program = partitioned(SPECS["llama"], "data=2,tensor=2", plan)
    rewritten = run_passes(program, PASS)
    assert lines(rewritten) != lines(program)
    assert_equals_eager(rewritten, captured(SPECS["llama"]))


def test_loss_over_a_cut_vocabulary_is_added_up_before_its_message() -> None:
    spec = SPECS["gpt"]
    program = partitioned(spec, "tensor=2", megatron(spec, "tensor=2"))
    messages = [op for op in program.ops if isinstance(op, AllReduceOp)]
    sent = [shape_of(result) for op in messages for result in op.results]
    assert sent.count((128, 1)) == 2  # the maxima, and the sums of exponentials
    assert () in sent  # the mean, which no rank divides after the message
    assert_equals_eager(program, captured(spec))
