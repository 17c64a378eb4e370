"""Loops written for plain PyTorch train as in eager with only the compile line added."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.tests.driver.step.loops import LOOPS
from shardweave.tests.spawn import run_ranks
from shardweave.tests.torch_versions import new_torch

SLOW = pytest.mark.slow
MESHES = [
    pytest.param("data=2", 0, marks=SLOW),
    pytest.param("tensor=2", 0, marks=SLOW),
    ("data=2,tensor=2", 3),
    pytest.param("stage=2", 0, marks=SLOW),
]


def plain(model: nn.Module, example: object, **options: object) -> nn.Module:
    del example, options
    return model


def assert_trains_as_in_eager(name: str, mesh: str, zero: int, backend: str) -> None:
    def compiled(model: nn.Module, example: Any, **options: Any) -> nn.Module:
        return sw.compile(model, example, mesh=mesh, zero=zero, backend=backend, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.PlanNote)
        losses, models = LOOPS[name](compiled)
    expected, eager = LOOPS[name](plain)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=1e-9)
    for model, other in zip(models, eager, strict=True):
        state = sw.Step.of(model).full_state_dict()
        for key, value in other.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=new_torch("dynamo refuses requires_grad_()", (2, 12)))
        if name == "gradient penalty"
        else name
        for name in LOOPS
    ],
)
def test_loop_trains_as_in_eager(name: str, mesh: str, zero: int) -> None:
    assert_trains_as_in_eager(name, mesh, zero, "reference")


def ranks(names: list[str], mesh: str, zero: int) -> None:
    for name in names:
        assert_trains_as_in_eager(name, mesh, zero, "distributed")


def test_loops_train_as_in_eager_on_processes() -> None:
    run_ranks(ranks, 2, ["optimizer first", "scaler", "LBFGS", "adversarial"], "data=2", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero"),
    [("data=2", 3), ("data=2", 0), ("tensor=2", 0), ("stage=2", 0), ("data=2,tensor=2", 3)],
)
def test_all_loops_train_as_in_eager_on_processes(mesh: str, zero: int) -> None:
    run_ranks(ranks, 4 if "," in mesh else 2, list(LOOPS), mesh, zero, timeout_s=600)


def test_optimizer_that_was_not_passed_is_refused_at_its_first_step() -> None:
    run_ranks(step_with_old_optimizer, 2)


def step_with_old_optimizer() -> None:
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sw.compile(model, (x,), mesh="tensor=2")
    assert isinstance(model.weight, DTensor)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' of before sw.compile.*optimizers=optimizer"):
        optimizer.step()
