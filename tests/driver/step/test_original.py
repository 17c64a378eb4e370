"""What is done to the model that was compiled, and reaches no step, is answered: once, in words."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import shardweave as sw

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Two maps and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x))).square().mean()


def compiled(model: nn.Module) -> sw.Step:
    return sw.compile(model, (X,), mesh="data=2", backend="reference")


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Expects exactly one, at a line of this file."""
    with pytest.warns(UserWarning, match=match) as seen:
        yield
    assert [record.filename for record in seen] == [__file__]


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def change_values(model: Model) -> None:
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


@torch.no_grad()
def test_what_is_changed_late_is_told_within_sixteen_calls() -> None:
    model = Model()
    step = compiled(model)
    for _ in range(12):
        step(X)
    change_values(model)
    with one_warning("changed after sw.compile"):
        for _ in range(16):
            step(X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.eval(),
            r"^the model was put in evaluation mode after sw.compile.*step\.eval\(\)",
        ),
        (
            lambda m: m.drop.eval(),
            r"module 'drop' of the model .* step\.get_submodule\('drop'\)\.eval\(\)",
        ),
        (
            lambda m: m.up.requires_grad_(False),
            r"requires_grad of 'up.weight' and 1 more .* step\.get_parameter\('up.weight'\)",
        ),
        (
            lambda m: m.up.weight.register_post_accumulate_grad_hook(lambda p: None),
            "hook after the accumulation of its gradient.* register it on that of the step",
        ),
        (change_values, r"step\.load_state_dict\(model\.state_dict\(\)\)"),
        (
            lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(4, 4))),
            "changed after sw.comp",
        ),
    ],
)
def test_change_of_the_model_that_has_no_effect_is_warned_of_once(
    change: Callable[[Model], None], message: str
) -> None:
    model = Model()
    step = compiled(model)
    with silence():
        step(X)
    change(model)
    with one_warning(message):
        step(X)
        step(X)
    change(model)
    with silence():
        step(X)


def test_model_that_is_kept_beside_the_step_for_comparison_is_no_warning() -> None:
    model = Model()
    step = compiled(model)
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (step, model)]
    with silence():
        for _ in range(3):
            step(X)
            model(X).backward()
            for module, optimizer in zip((step, model), optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                module.eval()
            step(X)
            model.train()
            step.train()
        model.load_state_dict(step.full_state_dict(), strict=False)
        step(X)
        step.load_state_dict(model.state_dict())
        model.to("meta")
        step(X)


def test_copies_of_a_step_are_no_warning() -> None:
    model = Model()
    step = compiled(model)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    average = AveragedModel(step)
    with silence():
        for _ in range(2):
            optimizer.zero_grad()
            step(X)
            optimizer.step()
            average.update_parameters(step)
        average.eval()
        average(X)
        assert isinstance(average.module, sw.Step)
        model.load_state_dict(average.module.full_state_dict(), strict=False)
        step.eval()
        step(X)


def test_optimizer_of_the_models_parameters_is_warned_of_in_its_first_step() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled(model)
    step(X)
    with one_warning(r"of step\.parameters\(\), after sw.compile"):
        optimizer.step()
        optimizer.step()
    with silence():
        torch.optim.SGD(step.parameters(), lr=0.1).step()
        torch.optim.SGD(Model().parameters(), lr=0.1).step()


def test_gradients_that_are_not_set_to_zero_are_warned_of() -> None:
    model = Model()
    step = compiled(model)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    with silence():
        for set_to_none in (True, False):
            step(X)
            step(X)  # accumulates
            optimizer.step()
            step.compile_for(X, train=True)
            optimizer.zero_grad(set_to_none=set_to_none)
        step(X)
        optimizer.step()
    model.zero_grad()
    with one_warning("optimizer.zero_grad.. or step.zero_grad"):
        step(X)


def test_state_of_the_model_that_is_behind_the_step_is_warned_of() -> None:
    model = Model()
    step = compiled(model)
    with silence():
        model.state_dict()
        step(X)
        torch.optim.SGD(step.parameters(), lr=0.1).step()
    with one_warning(r"from before sw.compile.*write step\.full_state_dict\(\)"):
        model.state_dict()
        model.state_dict()
    fresh = Model()
    step = compiled(fresh)
    step(X)
    torch.optim.SGD(step.parameters(), lr=0.1).step()
    with silence():
        fresh.load_state_dict(step.full_state_dict(), strict=False)
        fresh.state_dict()


def test_copy_or_pickle_of_the_model_needs_no_step() -> None:
    model = Model()
    compiled(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.state_dict().keys() == model.state_dict().keys()
    hook = next(iter(model._state_dict_pre_hooks.values()))
    assert "shardweave" not in pickle.dumps(hook).decode("latin1")


def test_step_that_another_of_the_same_model_has_left_behind_says_so() -> None:
    model = Model()
    trained, other = compiled(model), compiled(model).eval()
    with silence():
        other(X)
        trained(X)
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        trained.eval()(X)
    with one_warning("another step of the same model was trained"):
        other(X)
        other(X)
    model = Model()
    trained, other = compiled(model), compiled(model).eval()
    trained(X)
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    other.load_state_dict(trained.full_state_dict())
    with silence():
        other(X)


@pytest.mark.filterwarnings("ignore:parameters of the model were changed")
def test_model_with_other_parameters_is_captured_no_more() -> None:
    for change, found in (
        (lambda m: m.double(), r"'up.weight' of the model is \(4, 4\) float64, and was .*float32"),
        (lambda m: setattr(m.down, "weight", m.up.weight), "'down.weight' of the model is none"),
    ):
        model = Model()
        step = compiled(model)
        step(X)
        change(model)
        with pytest.raises(ValueError, match=found):
            step(X[:2])
