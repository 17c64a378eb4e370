"""apply-plan: a plan's shardings on the right arguments and ops, and clear errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassError, run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.plan.plan import Plan
from shardweave.tests.ir_text import lines, shardings, step

TEXT = """
    param %fc.weight : tensor<8x6xf64>
    param %fc.bias : tensor<8xf64>
    param %out.weight : tensor<6x8xf64>
    input %x : tensor<4x6xf64>
    %wt = aten.permute(%fc.weight, dims = [1, 0]) {layer = "fc"} : tensor<6x8xf64>
    %y = aten.addmm(%fc.bias, %x, %wt) {layer = "fc"} : tensor<4x8xf64>
    %z = aten.relu(%y) {layer = "act"} : tensor<4x8xf64>
    %vt = aten.permute(%out.weight, dims = [1, 0]) {layer = "out"} : tensor<8x6xf64>
    %u = aten.mm(%z, %vt) {layer = "out"} : tensor<4x6xf64>
    %s = aten.sum(%u) {layer = ""} : tensor<f64>
    output %s
"""


def applied(mesh: str = "tensor=2", /, **tables: Any) -> Program:
    return run_passes(step(TEXT, mesh), [ApplyPlanPass.of(Plan(**tables))])


def error_of(tables: Mapping[str, Any]) -> str:
    """The message of the PassError that a plan causes, on a mesh of 3 x 2; it must be one line."""
    with pytest.raises(PassError) as error:
        applied("data=3,tensor=2", **tables)
    message = str(error.value)
    assert message.startswith("pass 'apply-plan': ")
    assert "\n" not in message
    return message.removeprefix("pass 'apply-plan': ")


def test_named_parameters_and_inputs_are_annotated_and_no_others() -> None:
    after = applied(
        "data=2,tensor=2",
        parameters={"fc.weight": '[{"tensor"}, {}]'},
        inputs={"x": '[{"data"}, {}]'},
    )
    assert shardings(after.arguments) == {
        "fc.weight": '[{"tensor"}, {}]',
        "fc.bias": "",
        "out.weight": "",
        "x": '[{"data"}, {}]',
    }
    assert all(" none " in line for line in lines(after, shardings=True)[:-1])


def test_pattern_names_every_parameter_it_fits_and_an_exact_name_wins() -> None:
    after = applied(parameters={"*.weight": '[{"tensor"}, {}]', "out.weight": "[{}, {}]"})
    found = shardings(after.arguments)
    assert found["fc.weight"] == '[{"tensor"}, {}]'
    assert found["out.weight"] == "[{}, {}]"
    assert found["fc.bias"] == ""


def test_layer_output_is_annotated_on_the_op_whose_value_leaves_the_layer() -> None:
    found = lines(applied(activations={"fc": '[{}, {"tensor"}]'}), shardings=True)
    assert found[0].startswith("%wt = aten.permute(%fc.weight, dims = [1, 0]) none")
    assert found[1] == ('%y = aten.addmm(%fc.bias, %x, %wt) <[{}, {"tensor"}]> : tensor<4x8xf64>')


def test_pattern_names_the_outputs_of_several_layers() -> None:
    found = lines(applied(activations={"*c*": '[{"tensor"}, {}]'}), shardings=True)
    assert ['<[{"tensor"}, {}]>' in line for line in found] == [
        False, True, True, False, False, False, False,
    ]  # fmt: skip


def test_program_without_a_mesh_takes_that_of_the_plan() -> None:
    after = applied("", mesh={"data": 2, "tensor": 4})
    assert str(after.mesh) == "data=2,tensor=4"


def test_mesh_of_the_program_wins_over_that_of_the_plan() -> None:
    tables = {"mesh": {"tensor": 8}, "parameters": {"fc.weight": '[{"tensor"}, {}]'}}
    after = applied("tensor=2", **tables)
    assert str(after.mesh) == "tensor=2"


def test_plan_is_read_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(parameters={"fc.bias": '[{"tensor"}]'}).save(path)
    after = run_passes(step(TEXT, "tensor=2"), f'apply-plan{{file="{path}"}}')
    assert shardings(after.arguments)["fc.bias"] == '[{"tensor"}]'


@pytest.mark.parametrize("options", [{}, {"file": "a", "json": "b"}])
def test_exactly_one_source_of_the_plan_must_be_given(options: dict[str, str]) -> None:
    with pytest.raises(PassError, match=r'needs one of file="plan\.json" and json="\.\.\."'):
        run_passes(step(TEXT, "tensor=2"), [ApplyPlanPass(**options)])


def test_missing_plan_file_is_one_clear_line() -> None:
    with pytest.raises(PassError) as error:
        run_passes(step(TEXT, "tensor=2"), 'apply-plan{file="no/such.json"}')
    assert str(error.value) == (
        "pass 'apply-plan': plan 'no/such.json' cannot be read: No such file or directory; "
        "give a JSON file."
    )


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        (
            {"parameters": {"h.0.weight": "[{}]"}},
            "the plan names parameter 'h.0.weight', which this program does not have (it has "
            "fc.weight, fc.bias, out.weight); correct the name, or use a plan for this model.",
        ),
        (
            {"parameters": {"h.*.weight": "[{}]"}},
            "the plan names parameter 'h.*.weight', which this program does not have",
        ),
        (
            {"inputs": {"fc.weight": "[{}]"}},
            "the plan names input 'fc.weight', which this program does not have (it has x);",
        ),
        (
            {"activations": {"fc_2": "[{}]"}},
            "the plan names layer 'fc_2', which this program does not have (it has fc, act, out);",
        ),
        (
            {"activations": {"fc": "[{}]"}},
            "the plan shards activations of layer 'fc' as [{}], but no output of the layer has that "
            "number of dims; give one {...} per dim.",
        ),
        (
            {"activations": {"fc": "cut it"}},
            "layer 'fc': 'cut it' is not a sharding: '[' expected. "
            'Write one {..} per dim, as in [{"data"}, {}].',
        ),
        (
            {"parameters": {"fc.bias": '[{"tensor"}'}},
            "param 'fc.bias': '[{\"tensor\"}' is not a sharding: ",
        ),
        (
            {"parameters": {"fc.bias": "[{}, {}]"}},
            "param 'fc.bias' of shape [8]: sharding #dist.sharding<[{}, {}]> has 2 dims, but the "
            "value has shape (8,); give one {...} per dim.",
        ),
        (
            {"parameters": {"fc.bias": '[{"expert"}]'}},
            "param 'fc.bias' of shape [8]: the mesh data=3,tensor=2 has no axis 'expert'; its axes "
            "are ['data', 'tensor']; use one of them, or add 'expert' to the mesh.",
        ),
        (
            {"inputs": {"x": '[{"data":4}, {}]'}},
            "input 'x' of shape [4, 6]: sharding #dist.sharding<[{\"data\":4}, {}]> does not fit a "
            "value of shape (4, 6): strides [4] do not cut dim 0 of size 4.",
        ),
        (
            {"inputs": {"x": '[{"tensor"}, {"tensor"}]'}},
            "axis 'tensor' is used twice",
        ),
        (
            {"inputs": {"x": '[{}, {}], unreduced = ["tensor"]'}},
            "is unreduced, but only an op can produce unreduced sums; remove 'unreduced'.",
        ),
    ],
)
def test_plan_that_does_not_fit_is_one_clear_line(tables: dict[str, Any], expected: str) -> None:
    assert expected in error_of(tables)


def test_single_op_is_annotated_by_layer_kind_and_number() -> None:
    after = applied(activations={"fc:addmm:0": '[{"tensor"}, {}]'})
    annotated = [op.name for op in after.ops if "wanted" in op.properties]
    assert annotated == ["aten.addmm"]


def test_unknown_op_is_one_clear_line() -> None:
    message = error_of({"activations": {"fc:addmm:1": '[{"tensor"}, {}]'}})
    assert message.startswith("the plan names layer 'fc:addmm:1', which this program does not have")


def test_plan_on_digits_refines_the_axis_of_the_mesh() -> None:
    after = applied(
        "tensor=4",
        mesh={"tensor.0": 2, "tensor.1": 2},
        parameters={"fc.weight": '[{"tensor.1"}, {}]'},
    )
    assert str(after.mesh) == "tensor.0=2,tensor.1=2"


def test_zero_leaves_a_dim_that_another_axis_shards_unevenly() -> None:
    text = TEXT.replace("8x", "7x").replace("x8x", "x7x").replace("<8xf64", "<7xf64")
    plan = Plan(
        parameters={"fc.weight": '[{"tensor"}, {}]', "fc.bias": '[{"tensor"}]'},
        inputs={"x": '[{"data"}, {}]'},
        zero=3,
    )
    after = run_passes(step(text, "data=2,tensor=2"), [ApplyPlanPass.of(plan)])
    stored = shardings(after.arguments)
    assert stored["fc.weight"] == '[{"tensor"} of 7, {"data"}]'
    assert stored["fc.bias"] == '[{"tensor"}]'
