"""megatron with an axis `expert`: what is cut, how tokens travel, and that it equals eager."""

from __future__ import annotations

import types
from functools import cache

import pytest
import torch

import shardweave as sw
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.tests.zoo import SPECS, Captured, assert_equals_eager, captured

SIZES = "num_hidden_layers=1,batch=8,seq=4"
EVERY = f"hf:mixtral:tiny,{SIZES}"
SLOTS = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=8,experts=4,capacity="
DEEPSEEK = f"hf:deepseek_v3:tiny,{SIZES},first_k_dense_replace=0"
MESHES = ("expert=2", "data=2,expert=2", "tensor=2,expert=2")


@cache
def of(spec: str) -> Captured:
    if "deepseek" not in spec:
        return captured(spec)
    # Its router computes in float32 whatever the model's dtype is.
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    doubled = types.ModuleType("doubled")
    vars(doubled).update(vars(torch), float32=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_deepseek_v3, "torch", doubled)
        return captured(spec)


def plan_of(spec: str, mesh: str) -> Plan:
    return plan_megatron(of(spec).program, as_mesh(mesh))


def step_of(spec: str, mesh: str) -> Program:
    return local_program(of(spec).program, plan_of(spec, mesh))


def kinds(program: Program, axis: str) -> dict[str, int]:
    """How often each kind of collective is over an axis alone."""
    found: dict[str, int] = {}
    for one in program.stats().collectives:
        if one.axes == (axis,):
            found[one.kind] = found.get(one.kind, 0) + one.count
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "spec", [EVERY, pytest.param(DEEPSEEK, marks=pytest.mark.slow), f"{SLOTS}1"]
)
def test_equal_to_eager(spec: str, mesh: str) -> None:
    assert_equals_eager(step_of(spec, mesh), of(spec))


def test_each_expert_is_on_one_device_and_its_features_on_those_of_tensor() -> None:
    plan = plan_of(EVERY, "tensor=2,expert=2")
    up, down = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    cuts = {
        up: '[{"expert"}, {"tensor":32}, {}]',  # of gates, and of what they gate
        down: '[{"expert"}, {}, {"tensor"}]',
    }
    assert cuts.items() <= plan.parameters.items()
    assert plan.used == cuts  # else gathered, as the batch is cut over the axis too
    assert plan.inputs == dict.fromkeys(("input_ids", "labels"), '[{"expert"}, {}]')
    assert plan.notes == ()


def test_without_an_axis_of_their_own_experts_are_cut_as_features_are() -> None:
    plan = plan_of(EVERY, "tensor=2")
    assert plan.parameters["model.layers.0.mlp.experts.down_proj"] == '[{"tensor"}, {}, {}]'


def test_every_expert_gathers_tokens_and_scatters_sums() -> None:
    found = kinds(step_of(EVERY, "data=2,expert=2"), "expert")
    # Tokens, and the gradients of what they come to; and the weights of the router.
    assert found == {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 2}


def test_slots_travel_by_all_to_all() -> None:
    found = kinds(step_of(f"{SLOTS}1", "expert=2"), "expert")
    assert "all_gather" not in found
    assert found["all_to_all"] == 4  # tokens to the slots, outputs back; and gradients


def test_tokens_stay_in_their_groups() -> None:
    """Nothing but gradients and the counts of what was dropped is over data."""
    program = step_of(f"{SLOTS}1", "data=2,expert=2")
    assert {one.kind for one in program.stats().collectives if "data" in one.axes} == {"all_reduce"}


@pytest.mark.parametrize(
    ("spec", "mesh", "reason"),
    [
        (SPECS["gpt"], "expert=2", "no product reads a parameter of experts x inputs x outputs"),
        (f"{SLOTS}1", "expert=8", "4 experts cannot be sharded over expert=8"),
    ],
)
def test_an_axis_that_cuts_no_experts_is_idle(spec: str, mesh: str, reason: str) -> None:
    plan = plan_of(spec, mesh)
    (note,) = plan.notes
    assert note.startswith(f"axis 'expert' of the mesh is idle: {reason}")
    assert (plan.parameters, plan.inputs) == ({}, {})


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv1d(8, 8, 3, groups=8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mT).square().mean()


def test_channels_of_a_convolution_are_no_experts() -> None:
    program = sw.capture(Convolved(), (torch.randn(2, 8, 6),))
    plan = plan_megatron(program, as_mesh("expert=2,tensor=2"))
    assert not any("expert" in cut for cut in plan.parameters.values())


@pytest.mark.parametrize("spec", [EVERY, f"{SLOTS}1"])
def test_a_batch_too_short_for_both_axes_is_cut_over_data(spec: str) -> None:
    """All devices of `expert` then have the same tokens, and add up what their experts make."""
    assert set(plan_of(spec, "data=4,expert=4").inputs.values()) == {'[{"data"}, {}]'}
    program = step_of(spec, "data=4,expert=4")
    assert "all_to_all" not in kinds(program, "expert")
    assert_equals_eager(program, of(spec))


def test_experts_that_do_not_divide_are_cut() -> None:
    spec = f"{SLOTS}0".replace("experts=4", "experts=5")
    assert plan_of(spec, "expert=2").parameters["h.0.mlp.up"] == '[{"expert"}, {}, {}]'
    assert_equals_eager(step_of(spec, "expert=2"), of(spec))
