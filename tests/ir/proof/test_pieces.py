"""The static proof of fused projections that are split: maps of their own, sums and joins."""

from __future__ import annotations

import pytest

from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir.proof.cases import num_refused_slips
from shardweave.tests.ir_text import step
from shardweave.tests.passes.test_split_projections import SLICES, TAIL, UNBOUND, marked

SPLIT = "split-projections,split-addmm,add-pending-sums,propagate-shardings,insert-collectives,cse"


@pytest.mark.parametrize("text", [SLICES, UNBOUND], ids=["slices", "unbound"])
@pytest.mark.parametrize("wanted", ['[{}, {"tensor"}]', '[{}, {"tensor":4}]'])
def test_split_projection_is_proved_and_what_is_wrong_in_it_is_not(text: str, wanted: str) -> None:
    whole = step(text + TAIL, "tensor=2")
    local = run_passes(marked(text + TAIL, wanted=wanted, mesh="tensor=2"), SPLIT)
    assert sum(op.name in ("aten.mm", "aten.addmm") for op in local.ops) == 9
    prove(local, against=whole)
    assert num_refused_slips(local, whole) > 8


SUM_OF_TWO = """
    input %g : tensor<4x3xf64>
    input %h : tensor<4x3xf64>
    param %w : tensor<3x6xf64>
    %wt = aten.permute(%w, dims = [1, 0]) : tensor<6x3xf64>
    %both = aten.cat([%g, %h], dim = 1) : tensor<4x6xf64>
    %dx = aten.mm(%both, %wt) : tensor<4x3xf64>
    output %dx
"""
SPLIT_SUM = """
    input %g : tensor<4x3xf64>
    input %h : tensor<4x3xf64>
    param %w : tensor<3x6xf64>
    %a = aten.slice.Tensor(%w, dim = 1, start = 0) : tensor<3x3xf64>
    %b = aten.slice.Tensor(%w, dim = 1, start = 3) : tensor<3x3xf64>
    %at = aten.permute(%a, dims = [1, 0]) : tensor<3x3xf64>
    %bt = aten.permute(%b, dims = [1, 0]) : tensor<3x3xf64>
    %first = aten.mm(%g, %at) : tensor<4x3xf64>
    %second = aten.mm(%h, %bt) : tensor<4x3xf64>
    %dx = aten.add.Tensor(%first, %second) : tensor<4x3xf64>
    output %dx
"""


def proved(text: str) -> Program:
    program: Program = step(text)
    prove(program, against=step(SUM_OF_TWO))
    return program


def test_product_of_what_is_joined_is_the_sum_over_its_pieces() -> None:
    proved(SPLIT_SUM)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("mm(%h, %bt)", "mm(%h, %at)"),
        ("mm(%h, %bt)", "mm(%g, %bt)"),
        ("add.Tensor(%first, %second)", "add.Tensor(%first, %first)"),
        ("add.Tensor(%first, %second)", "sub.Tensor(%first, %second)"),
        ("start = 3", "start = 2"),
    ],
)
def test_sum_with_another_piece_is_refused(right: str, wrong: str) -> None:
    with pytest.raises(ProofError):
        proved(SPLIT_SUM.replace(right, wrong))
