"""The static proof of dims that are cut unevenly: masks of padding, and what goes wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from xdsl.ir import Operation

import shardweave as sw
from shardweave.backends.reference.reference import run_reference
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.ir.proof.cases import Case as SlipCase
from shardweave.tests.ir.proof.cases import refused_slips
from shardweave.tests.ir.proof.slips import SLIPS
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import captured, megatron

REDUCTIONS = ("aten.sum.dim_IntList", "aten.amax")
ODD = "gpt:layers=1,hidden=6,heads=3,vocab=9,seq=4,batch=4,ffn=7"


@dataclass(frozen=True)
class Case:
    """A reduction over seven elements, four on each rank, and the program of a rank."""

    whole: Program
    local: Program

    @staticmethod
    def of(reduction: str) -> Case:
        whole = step(
            f"""
            input %x : tensor<4x7xf64> [{{}}, {{"tensor"}}]
            %exp = aten.exp(%x) {{layer = "a", phase = forward}} : tensor<4x7xf64>
            %all = {reduction}(%exp, dim = [1]) {{layer = "b", phase = forward}} : tensor<4xf64>
            output %all
            """,
            "tensor=2",
        )
        return Case(whole, sw.run_passes(whole, "propagate-shardings,insert-collectives"))

    def refusal(self, name: str, change: Callable[[Operation], None]) -> str:
        """What the proof says of the program with one op changed, which is wrong if it is run."""
        broken = self.local.clone()
        change(next(op for op in broken.ops if op.name == name))
        values = {("input", "x"): torch.linspace(-2, -1, 28).double().view(4, 7)}
        found, expected = run_reference(broken, values), run_reference(self.whole, values)
        assert not torch.allclose(found["output", "0"], expected["output", "0"], rtol=1e-9)
        with pytest.raises(ProofError) as error:
            prove(broken, against=self.whole)
        return str(error.value)


@pytest.fixture(scope="module", params=REDUCTIONS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case.of(request.param)


def test_mask_with_the_reductions_identity_is_proved(case: Case) -> None:
    assert any(op.name == "aten.masked_fill.Scalar" for op in case.local.ops)
    prove(case.local, against=case.whole)


def test_mask_that_is_dropped_is_refused_at_its_reader(case: Case) -> None:
    said = case.refusal(
        "aten.masked_fill.Scalar",
        lambda op: op.results[0].replace_all_uses_with(op.operands[0]),
    )
    assert "(%exp) has padding in dim 1 that is not known to be" in said


def test_mask_with_another_value_is_refused(case: Case) -> None:
    said = case.refusal(
        "aten.masked_fill.Scalar",
        lambda op: op.properties.update(value=to_attribute(1.0)),
    )
    assert "has padding in dim 1 that is not known to be" in said


@pytest.mark.parametrize("other", [3, 8])
def test_mask_that_ends_elsewhere_is_refused(case: Case, other: int) -> None:
    case.refusal("aten.ge.Scalar", lambda op: op.properties.update(other=to_attribute(other)))


def test_mask_of_another_rank_is_refused(case: Case) -> None:
    case.refusal("aten.mul.Scalar", lambda op: op.properties.update(other=to_attribute(0)))


def test_gather_that_keeps_padding_is_refused() -> None:
    whole = step("input %x : tensor<7xf64>\n%y = aten.exp(%x) : tensor<7xf64>\noutput %y")
    text = """
        input %x : tensor<4xf64> [{"tensor"} of 7]
        %y = aten.exp(%x) : tensor<4xf64>
        %g = dist.all_gather(%y, axes = ["tensor"], dim = 0, block = 4) : tensor<8xf64>
        %s = aten.slice.Tensor(%g, dim = 0, start = 0) : tensor<7xf64>
        output %s
    """
    prove(step(text, "tensor=2", local=True), against=whole)
    with pytest.raises(ProofError):
        prove(step(text.replace("start = 0", "start = 1"), "tensor=2", local=True), against=whole)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2", "data=3,tensor=4"])
def test_model_of_odd_sizes_is_proved_by_any_preset(mesh: str) -> None:
    for spec in (ODD, ODD.replace("batch=4", "batch=7")):
        for preset in ("default", "megatron", "oases"):
            passes = [ApplyPlanPass.of(megatron(spec, mesh)), f"preset:{preset}"]
            try:
                made = sw.run_passes(captured(spec).program, passes, mesh=mesh)
            except ValueError:  # the batch is too small for so many shards
                continue
            prove(made, against=captured(spec).program)


@pytest.mark.slow
def test_slip_in_a_program_of_odd_sizes_is_refused_or_computes_the_same() -> None:
    found, mesh = captured(ODD), "data=2,tensor=2"
    passes = [ApplyPlanPass.of(megatron(ODD, mesh)), "preset:default"]
    case = SlipCase.of(found.program, found.values, sw.run_passes(found.program, passes, mesh=mesh))
    num_refused, _ = refused_slips(case, SLIPS, 14)
    assert num_refused > 200
