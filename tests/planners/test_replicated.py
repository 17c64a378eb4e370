"""replicated: whole parameters, the batch over the data axis."""

from __future__ import annotations

import pytest

from shardweave.passes.pipeline import as_mesh
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.replicated import idle_data, notes_on_empty_parts, plan_replicated
from shardweave.tests.ir_text import step

TEXT = """
    param %w : tensor<8x6xf64>
    input %x : tensor<4x6xf64>
    input %scale : tensor<f64>
    input %table : tensor<1x2xf64>
    %y = aten.mul.Tensor(%x, %scale) : tensor<4x6xf64>
    output %y
"""


def test_inputs_are_cut_along_their_first_dim_and_parameters_are_whole() -> None:
    plan = plan_replicated(step(TEXT), as_mesh("data=2,tensor=2"))
    assert plan.parameters == {}
    assert plan.inputs == {"x": '[{"data"}, {}]'}
    assert (plan.planner, plan.mesh) == ("replicated", {"data": 2, "tensor": 2})


def test_input_whose_first_dim_is_too_short_stays_whole_with_a_note() -> None:
    plan = plan_replicated(step(TEXT), as_mesh("data=2"))
    assert plan.notes == ("input 'table' stays whole: its first dim 1 is too short for data=2",)


def test_data_axis_that_cuts_no_input_is_idle_with_a_note() -> None:
    text = TEXT.replace("4x6", "1x6")
    plan = plan_replicated(step(text), as_mesh("data=7"))
    assert plan.inputs == {}
    assert plan.notes[-1] == (
        "axis 'data' of the mesh is idle: no input can be sharded over data=7, and its ranks all "
        "compute the same"
    )
    assert idle_data({}, as_mesh("data=1,replica=2"), "data", "replica", "other") == [
        "axis 'replica' of the mesh is idle: no input can be sharded over replica=2, and its ranks "
        "all compute the same"
    ]


def test_first_dim_that_does_not_divide_is_cut() -> None:
    plan = plan_replicated(step(TEXT), as_mesh("data=3"))
    assert plan.inputs == {"x": '[{"data"}, {}]'}


def test_mesh_without_a_data_axis_cuts_nothing() -> None:
    plan = plan_replicated(step(TEXT), as_mesh("tensor=2"))
    assert (plan.inputs, plan.notes) == ({}, ())


def test_data_axis_can_have_another_name() -> None:
    plan = plan_replicated(step(TEXT), as_mesh("batch=4"), data="batch")
    assert plan.inputs == {"x": '[{"batch"}, {}]'}


EMPTY = "{} leaves {} of {} parts idle: dim {} of input 'x' has size {}; give {}, or fewer devices there"


@pytest.mark.parametrize(
    ("mesh", "axes", "empty", "count"),
    [
        ("data=500,tensor=8", "data=500", 496, 500),
        ("data=9", "data=9", 5, 9),
        ("data=7", "data=7", 3, 7),
        ("data=2,stage=2", "data=2", 0, 2),
        ("data=4", "data=4", 0, 4),
        ("tensor=8", "", 0, 1),
    ],
)
def test_parts_of_an_axis_that_hold_nothing_of_the_batch_are_noted(
    mesh: str, axes: str, empty: int, count: int
) -> None:
    program = step(TEXT)
    notes = notes_on_empty_parts(plan_replicated(program, as_mesh(mesh)), program)
    expected = EMPTY.format(axes, empty, count, 0, 4, "a larger batch")
    assert notes == ([expected] if empty else [])


def test_empty_parts_of_two_axes_and_of_another_dim_are_noted() -> None:
    program = step(TEXT)
    both = Plan(mesh={"data": 3, "expert": 2}, inputs={"x": '[{"data", "expert"}, {}]'})
    expected = EMPTY.format("data=3,expert=2", 2, 6, 0, 4, "a larger batch")
    assert notes_on_empty_parts(both, program) == [expected]
    along = Plan(mesh={"context": 4}, inputs={"x": '[{}, {"context"}]'})
    expected = EMPTY.format("context=4", 1, 4, 1, 6, "longer inputs")
    assert notes_on_empty_parts(along, program) == [expected]
