"""Loops over a step's modules find those that they look for, as in the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import shardweave as sw
from shardweave.tests.driver.step.models import F64, Normed, batch, compiled
from shardweave.tests.eager import assert_step_equals_eager


def test_norms_that_are_put_in_evaluation_by_their_class_stay_there() -> None:
    model = Normed()
    step = compiled(copy.deepcopy(model), batch(), mesh="data=2")
    for module in (step, copy_of_step := copy.deepcopy(step), model):
        for part in module.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
    given = batch().values()
    assert_step_equals_eager(step, model, *given)
    assert_step_equals_eager(copy_of_step, model, *given)
    assert torch.equal(step.get_buffer("norm.running_mean"), torch.zeros(8, dtype=F64))
    assert "(norm): BatchNorm1d()" in repr(step)


def test_statistics_that_torch_would_average_anew_are_refused_untouched() -> None:
    step = compiled(Normed(), batch(), mesh="data=2")
    step(**batch())
    before = step.norm.running_mean.clone()
    with pytest.raises(AttributeError, match="'reset_running_stats' of the model is code"):
        update_bn([batch()["x"]], step)
    assert torch.equal(step.norm.running_mean, before)


class Listed(nn.Module):
    """Parts in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
        self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.heads["a"](x) * self.scales[0] * self.scales[1]).square().mean()


def test_lists_and_dicts_of_modules_give_those_of_the_step() -> None:
    x, model = torch.randn(4, 4, dtype=F64), Listed()
    step = sw.compile(copy.deepcopy(model), (x,), mesh="data=2", backend="reference")
    for module in (step, model):
        assert [len(part) for part in (module.layers, module.heads, module.scales)] == [3, 1, 2]
        assert [*module.heads] == ["a"]
        module.layers[0].requires_grad_(False)
        module.layers[1:].requires_grad_(False)
        module.heads["a"][0].bias.requires_grad_(False)
        module.scales[-1].requires_grad_(False)
    assert_step_equals_eager(step, model, x)
    trained = [[p.grad is not None for p in module.parameters()] for module in (step, model)]
    assert trained[0] == trained[1]
    assert sum(trained[0]) == 2


def test_buffer_of_the_loop_is_in_states_of_the_step() -> None:
    step = compiled(Normed(), batch(), mesh="data=2")
    step.register_buffer("epoch", torch.tensor(3))
    other = compiled(Normed(), batch(), mesh="tensor=2")
    other.register_buffer("epoch", torch.tensor(0))
    other.load_state_dict(step.full_state_dict())
    assert other.epoch.item() == 3
    assert torch.equal(other.get_parameter("up.weight"), step.get_parameter("up.weight"))
