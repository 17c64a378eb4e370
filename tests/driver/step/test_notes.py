"""What the command line notes of a plan, Python warns of; and a step says what it is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.tests import compiled as compiled_copies
from shardweave.tests.compiled import compile_copy
from shardweave.tests.driver.step.models import Normed, batch, compiled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "tensr=2"}, r"axis 'tensr' of the mesh is idle"),
        ({"mesh": "data=5"}, r"data=5 leaves 1 of 5 parts idle: dim 0 of input '.' has size 8"),
        (
            {"mesh": "data=2,tensr=2", "plan": {}},
            r"axis 'tensr' .* idle: .*did you mean 'tensor'\?",
        ),
    ],
)
def test_what_a_plan_leaves_undone_is_a_warning(options: dict[str, Any], message: str) -> None:
    with pytest.warns(sw.PlanNote, match=message) as caught:
        step = compiled(Normed(), batch(), **options)
    assert all(warning.filename == compiled_copies.__file__ for warning in caught)
    assert any(str(warning.message) in step.notes for warning in caught)


def test_batch_that_is_too_short_to_be_cut_is_a_warning_once() -> None:
    step = compiled(Normed(), batch(), mesh="data=2").eval()
    with pytest.warns(sw.PlanNote, match="first dim 1 is too short for data=2") as caught:
        step(**batch(1))
    assert len(caught) == 2
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(**batch(1))
        step(**batch(7))


def test_good_plan_is_no_warning_and_is_shown() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = compiled(Normed(), batch())
    assert isinstance(step.plan, sw.Plan)
    assert step.plan.parameters["up.weight"] == '[{"tensor"}, {}]'
    assert step.notes == ()
    step.eval()
    step(**batch(4))
    lines = step.summary().splitlines()
    assert lines[0] == "mesh data=2,tensor=2"
    assert lines[1].startswith("6 parameters of 736 B, ")
    assert lines[2].startswith("training, x (8, 4) float64, y (8, 4) float64: ")
    assert "over data (backward)" in lines[2]
    assert lines[3].startswith("evaluation, x (4, 4)")


def test_parameters_that_zero_leaves_whole_are_a_warning() -> None:
    text = r"zero=3 leaves 6 of 6 parameters, 100% of .* whole .*'up\.weight': none .* by data=3"
    with pytest.warns(sw.PlanNote, match=text):
        compiled(Normed(), batch(9), mesh="data=3", zero=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(Normed(), batch(), mesh="data=2", zero=3)


def test_notes_are_in_the_summary() -> None:
    with pytest.warns(sw.PlanNote):
        step = compiled(Normed(), batch(), mesh="tensr=2")
    assert step.summary().splitlines()[-1].startswith("note: axis 'tensr' of the mesh is idle")


class Linear(nn.Module):
    """Has an op without a factor rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pdist(self.up(x)).square().sum()


def test_op_without_a_factor_rule_is_a_warning_and_a_note() -> None:
    x = torch.randn(8, 4, dtype=torch.float64)
    with pytest.warns(sw.PlanNote, match=r"aten\.\S+ \(in .*has no factor rule") as caught:
        step = compiled(Linear(), {"x": x}, mesh="data=2")
    said = [str(warning.message) for warning in caught]
    assert len(set(said)) == len(said)
    assert set(said) <= set(step.notes)
    assert f"note: {said[0]}" in step.summary().splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.eval()
        step(x=x)
        compile_copy(Linear(), kwargs={"x": x})


class Plain(nn.Module):
    """A linear map of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_step_on_one_device_has_no_plan() -> None:
    step = compile_copy(Plain(), (torch.ones(2, 4),))
    assert step.plan is None
    assert step.summary().splitlines()[0] == "one device"
    assert list(step.rows("x")) == [0, 1]
    with pytest.raises(ValueError, match=r"there is no input 'xx'; did you mean"):
        step.rows("xx")
