"""A plan carried over to other shapes: parameters stay, the rest follows where it divides."""

from __future__ import annotations

import dataclasses

import pytest

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.other_shapes import FittedPlan, fit_plan
from shardweave.planners.lowering.other_shapes import _with_other_layers as with_other_layers
from shardweave.planners.plan.plan import Plan

MESH = Mesh(data=2, tensor=2)

PLAN = Plan(
    mesh={"data": 2, "tensor": 2},
    parameters={"up.*": '[{"data"}, {"tensor"}]'},
    inputs={"x": '[{"data"}, {"tensor"}]'},
    activations={"up": '[{"data"}, {"tensor"}]', ":relu:0": '[{"data"}, {}]'},
    batch_split=2,
)


def program(rows: int, features: int = 8) -> Program:
    """Two maps of an input of so many rows; `down` is not in the plan."""
    return Program.parse(f"""
builtin.module {{
  func.func @step(
      %up: tensor<{features}x16xf32> {{dist.kind = "param", dist.name = "up.weight"}},
      %down: tensor<16x8xf32> {{dist.kind = "param", dist.name = "down.weight"}},
      %x: tensor<{rows}x{features}xf32> {{dist.kind = "input", dist.name = "x"}},
      %mask: tensor<{rows}x16xf32> {{dist.kind = "input", dist.name = "mask"}})
      -> (tensor<{rows}x8xf32> {{dist.kind = "output", dist.name = "0"}}) {{
    %wide = aten.mm(%x, %up) {{layer = "up", phase = forward}} : tensor<{rows}x16xf32>
    %kept = aten.mul.Tensor(%wide, %mask) {{layer = "", phase = forward}} : tensor<{rows}x16xf32>
    %relu = aten.relu(%kept) {{layer = "", phase = forward}} : tensor<{rows}x16xf32>
    %out = aten.mm(%relu, %down) {{layer = "down", phase = forward}} : tensor<{rows}x8xf32>
    func.return %out : tensor<{rows}x8xf32>
  }}
}}""")


def fitted(rows: int) -> FittedPlan:
    local = local_program(program(8), PLAN)
    slots = [slot for slot in local.arguments if slot.kind == "param"]
    stored = {("param", slot.name): local.sharding_of_slot(slot) for slot in slots}
    return fit_plan(PLAN, program(rows), MESH, stored, ["data"])


def test_parameters_are_named_as_they_are_stored_and_read() -> None:
    plan = fitted(4).plan
    assert plan.parameters["up.weight"] == '[{"data"}, {"tensor"}]'
    assert plan.used["up.weight"] == '[{}, {"tensor"}]'
    assert set(plan.parameters) == {"up.weight", "down.weight"}


def test_what_divides_is_kept() -> None:
    found = fitted(4)
    assert found.notes == []
    assert found.plan.inputs == {"x": '[{"data"}, {"tensor"}]', "mask": '[{"data"}, {}]'}
    assert found.plan.activations == PLAN.activations
    assert found.plan.batch_split == 2
    assert local_program(program(4), found.plan).is_local


def test_what_does_not_divide_is_kept_too() -> None:
    found = fitted(3)
    assert found.notes == []
    assert found.plan.inputs == fitted(4).plan.inputs
    assert found.plan.activations == PLAN.activations
    assert found.plan.batch_split == 2
    assert local_program(program(3), found.plan).is_local


def test_what_is_too_short_stays_whole_with_a_note() -> None:
    found = fitted(1)
    assert found.plan.inputs == {}
    assert found.plan.activations == {"up": '[{}, {"tensor"}]'}
    assert found.plan.batch_split == 1
    assert found.notes == [
        "input 'x' stays whole: its first dim 1 is too short for data=2",
        "input 'mask' stays whole: its first dim 1 is too short for data=2",
        "2 of the plan's shardings of activations do not fit these shapes",
        "the 1 rows of 'x' on a device are not split into sub-batches: they do not divide by 2",
    ]
    assert local_program(program(1), found.plan).is_local


@pytest.mark.parametrize("rows", [2, 6])
def test_rows_that_divide_over_devices_but_not_into_sub_batches(rows: int) -> None:
    found = fitted(rows)
    assert found.plan.inputs["x"] == '[{"data"}, {"tensor"}]'
    assert found.plan.batch_split == 1


def test_input_that_the_plan_keeps_whole_stays_so_without_a_note() -> None:
    whole = dataclasses.replace(PLAN, inputs={"*": "[{}, {}]"}, activations={}, batch_split=1)
    found = fit_plan(whole, program(3), MESH, {("param", "up.weight"): Sharding.replicated(2)}, [])
    assert found.notes == []
    assert found.plan.parameters["up.weight"] == "[{}, {}]"


def test_layer_that_no_stage_names_joins_the_stage_of_its_module() -> None:
    text = str(program(4)).replace('layer = "up"', 'layer = "a.up"')
    text = text.replace('layer = "down"', 'layer = "a.down"').replace('"down.w', '"a.down.w')
    stages = (("a.up",), ("rest",))
    assert with_other_layers(Program.parse(text), stages) == (("a.up", "a.down"), ("rest",))
