"""A plan against a program: names, shapes and stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.planners.plan.plan import Plan, PlanError
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.zoo import SPECS, captured, megatron


def program() -> Program:
    return captured(SPECS["gpt"]).program


def staged(*stages: tuple[str, ...]) -> Plan:
    return Plan(pipeline=Pipeline(stages))


def test_plan_of_a_planner_fits_its_program() -> None:
    check_plan(megatron(SPECS["gpt"], "data=2,tensor=2"), program())


def test_sharding_that_leaves_devices_nothing_is_refused() -> None:
    sizes = {"data": 2, "tensor": 7}
    cut = {"wte.weight": '[{"data", "tensor"}, {}]'}
    check_plan(Plan(mesh=sizes, parameters=cut), program())
    with pytest.raises(PlanError, match=r"param 'wte.weight' of shape"):
        check_plan(Plan(mesh=sizes | {"tensor": 64}, parameters=cut), program())


def test_stages_by_name_and_pattern_are_checked() -> None:
    check_plan(staged(("wte", "wpe", "h.0"), ("h.1", "ln_f", "head")), program())
    check_plan(staged(("w*", "h.*"), ("ln_f", "head")), program())
    with pytest.raises(
        PlanError, match=r"stage 1 of the plan names layer 'h.9', which this program does not"
    ):
        check_plan(staged(("h.0",), ("h.9",)), program())
    with pytest.raises(PlanError, match=r"puts block 'h.1' into stages \[0, 1\]; put it into one"):
        check_plan(staged(("h.*",), ("h.1",)), program())


def test_pattern_of_all_layers_matches_a_model_without_layers() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    plain = capture(Scale(), (torch.ones(2, 4),))
    check_plan(staged(("*",)), plain)
    with pytest.raises(PlanError, match=r"layer 'h.0', which .* have \(it has none\)"):
        check_plan(staged(("h.0",)), plain)
