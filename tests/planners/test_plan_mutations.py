"""A plan with a slip of the pen is applied or refused in one line; nothing else ever happens."""

from __future__ import annotations

import random

import pytest

from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.plan.plan import Plan
from shardweave.tests.mutations import mutated
from shardweave.tests.zoo import captured, megatron

SPEC = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4"
MESH = "data=2,tensor=2"
PASSES = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives"

BY_HAND = """{
  "mesh": {"data": 2, "tensor": 2},
  "parameters": {
    "h.*.mlp.fc_in.weight": "[{\\"tensor\\"}, {}]",
    "h.*.mlp.fc_out.weight": "[{}, {\\"tensor\\":32}]",
    "wte.weight": "[{\\"data\\", \\"tensor\\"}, {}]"
  },
  "inputs": {"*": "[{\\"data\\"}, {}]"},
  "activations": {"h.0.mlp": "[{\\"data\\"}, {}, {}]"}
}"""


@pytest.mark.parametrize("seed", range(8))
def test_mutated_plan_is_applied_or_refused_in_one_line(seed: int) -> None:
    outcomes = [outcome_of(seed * 25 + index) for index in range(25)]
    assert None in outcomes
    assert any(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 48))
def test_thousand_mutated_plans_never_fail_otherwise(seed: int) -> None:
    test_mutated_plan_is_applied_or_refused_in_one_line(seed)


def outcome_of(seed: int) -> str | None:
    """Why a plan with one slip is refused; None if the ranks' program of it is well formed."""
    rng = random.Random(seed)
    planned = megatron(SPEC, MESH, sequence_parallel=True).to_json()
    text = mutated(rng.choice((BY_HAND, planned)), rng)
    try:
        plan = Plan.from_json(text, "p.json")
        # Each pass leaves a program that verify finds well formed, or fails as a defect.
        run_passes(captured(SPEC).program, [ApplyPlanPass.of(plan), PASSES], mesh=MESH)
    except ValueError as error:
        message = str(error)
        assert message, text
        assert "\n" not in message, text
        assert "left an invalid program" not in message, f"{message}\n{text}"
        return message
    return None
