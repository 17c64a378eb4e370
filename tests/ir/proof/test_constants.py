"""The static proof of constants, which are parts of every tensor of their value."""

from __future__ import annotations

import pytest

from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import captured, megatron

WHOLE = """
    input %i : tensor<4x4xi64>
    input %x : tensor<4x4xf64>
    %long = aten.full(fill_value = 0.0) : tensor<4x8xf64>
    %a = aten.scatter_add(%long, %i, %x, dim = 1) : tensor<4x8xf64>
    %zeros = aten.full(fill_value = 0.0) : tensor<4x4xf64>
    %b = aten.scatter_add(%zeros, %i, %x, dim = 1) : tensor<4x4xf64>
    output a = %a
    output b = %b
"""
LOCAL = """
    input %i : tensor<2x4xi64> [{"data"}, {}]
    input %x : tensor<2x4xf64> [{"data"}, {}]
    %long = aten.full(fill_value = 0.0) : tensor<2x8xf64>
    %a = aten.scatter_add(%long, %i, %x, dim = 1) : tensor<2x8xf64>
    %zeros = aten.full(fill_value = 0.0) : tensor<2x4xf64>
    %b = aten.scatter_add(%zeros, %i, %x, dim = 1) : tensor<2x4xf64>
    output a = %a [{"data"}, {}]
    output b = %b [{"data"}, {}]
"""


def test_constant_that_is_a_part_of_several_is_read_as_what_its_reader_needs() -> None:
    prove(step(LOCAL, "data=2", local=True), against=step(WHOLE))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("%zeros = aten.full(fill_value = 0.0)", "%zeros = aten.full(fill_value = 1.0)"),
        ("scatter_add(%zeros, %i, %x, dim = 1)", "scatter_add(%zeros, %i, %x, dim = 0)"),
        ("%a = aten.scatter_add(%long", "%a = aten.scatter_add(%ones"),
    ],
)
def test_another_constant_or_dim_is_refused(right: str, wrong: str) -> None:
    ones = "    %ones = aten.full(fill_value = 1.0) : tensor<2x8xf64>\n    %a ="
    text = LOCAL.replace(right, wrong).replace("    %a =", ones)
    with pytest.raises(ProofError):
        prove(step(text, "data=2", local=True), against=step(WHOLE))


def test_first_position_is_not_taken_for_a_constant_of_the_model_alone() -> None:
    """Dropout draws by positions, of which the first is zero; and so is a label that is left out."""
    spec = "gpt:layers=1,hidden=16,heads=8,vocab=32,seq=16,batch=8,dropout=0.1"
    whole = captured(spec).program
    plan = ApplyPlanPass.of(megatron(spec, "tensor=8"))
    local = run_passes(whole, [plan, "preset:sub-batches"], mesh="tensor=8")
    prove(local, against=whole)
