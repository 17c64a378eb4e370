"""The proof of sums of exponentials by a shard's own maximum, and what is no such sum."""

from __future__ import annotations

import json

import pytest

from shardweave.backends.reference import run_reference
from shardweave.ir.program import Program
from shardweave.ir.proof.certificate import certificate_of
from shardweave.ir.proof.check import check_certificate, digest_of
from shardweave.ir.proof.expressions import Expressions
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import arguments_of, prove, walked
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

PASSES = "preset:partition,sum-by-local-maxima"


def sums(text: str = SUMS, passes: str = PASSES) -> tuple[Program, Program]:
    """A program, and what a rank runs."""
    whole = step(text, "data=2,tensor=2")
    return whole, run_passes(whole, passes)


def check(whole: Program, local: Program) -> None:
    certificate = prove(local, against=whole).certificate()
    assert "in one" in {step["by"] for step in certificate["steps"]}
    check_certificate(json.dumps(certificate), local, against=whole)


@pytest.mark.parametrize("text", [SUMS, FIRST_DIM, ALL])
@pytest.mark.parametrize("more", ["", ",start-collectives", ",fuse-kernels{matmul=false}"])
def test_sum_by_own_maxima_is_proved_and_its_certificate_checks(text: str, more: str) -> None:
    check(*sums(text, PASSES + more))


def test_sum_by_own_maxima_in_sub_batches_is_proved_and_its_certificate_checks() -> None:
    text = SUMS.replace("output %t", "%s = aten.sum.dim_IntList(%t, dim = []) : tensor<f64>\n"
                        "output %s").replace("output other = %p", "")  # fmt: skip
    check(*sums(text.replace('[{"data"}', "[{}"), f"split-batch{{n=2}},{PASSES}"))


def claimed(whole: Program, local: Program) -> dict[str, object]:
    """The certificate of all that the proof finds in a program that it may refuse."""
    table = Expressions()
    values = table.read(whole.function.body.block, arguments_of(table, whole))
    table.num_read = len(table.shapes)
    walk, _ = walked(local, table)
    return certificate_of(walk, values, local, whole)


def refused(whole: Program, local: Program, certificate: dict[str, object] | None = None) -> None:
    """Assert that a program is refused, with the certificate of another one, and with its own."""
    with pytest.raises(ProofError):
        prove(local, against=whole)
    for one in filter(None, (certificate, claimed(whole, local))):
        with pytest.raises(ProofError):
            check_certificate({**one, "local": digest_of(local)}, local, against=whole)
