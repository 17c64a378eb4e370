"""Loops written for plain PyTorch train as in eager with only the compile line added."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.tests.driver.step import loops
from shardweave.tests.driver.step.all_loops import (
    LOOPS,
    REFUSED,
    assert_trains_as_in_eager,
)
from shardweave.tests.spawn import run_ranks
from shardweave.tests.torch_versions import new_torch

SLOW = pytest.mark.slow
MESHES = [
    pytest.param("data=2", 0, marks=SLOW),
    pytest.param("tensor=2", 0, marks=SLOW),
    ("data=2,tensor=2", 3),
    pytest.param("stage=2", 0, marks=SLOW),
]


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=new_torch("dynamo refuses requires_grad_()", (2, 12)))
        if name in ("gradient penalty", "inner penalty")
        else pytest.param(name, marks=() if name in loops.LOOPS else SLOW)
        for name in LOOPS
    ],
)
def test_loop_trains_as_in_eager(name: str, mesh: str, zero: int) -> None:
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            assert_trains_as_in_eager(name, mesh, zero, "reference")
    else:
        assert_trains_as_in_eager(name, mesh, zero, "reference")


def ranks(names: list[str], mesh: str, zero: int) -> None:
    for name in names:
        assert_trains_as_in_eager(name, mesh, zero, "distributed")


def test_loops_train_as_in_eager_on_processes() -> None:
    names = ["optimizer first", "scaler", "LBFGS", "adversarial", "Wasserstein with penalty"]
    names += ["meta-learning", "weight penalty", "retained graph", "submodules", "validation"]
    run_ranks(ranks, 2, [*names, "weights averaged", "in place"], "data=2", 3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "tensor=2", "stage=2", "data=2,tensor=2"])
@pytest.mark.parametrize("module", ["loops", "loops_gradients", "loops_models", "loops_training"])
def test_all_loops_train_as_in_eager_on_processes(mesh: str, module: str) -> None:
    chosen = import_module(f"shardweave.tests.driver.step.{module}").LOOPS
    names = [name for name in chosen if name not in REFUSED]
    is_wide = "," in mesh
    run_ranks(ranks, 4 if is_wide else 2, names, mesh, 3 if is_wide else 0, timeout_s=900)


def test_optimizer_that_was_not_passed_is_refused_at_its_first_step() -> None:
    run_ranks(step_with_old_optimizer, 2)


def step_with_old_optimizer() -> None:
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sw.compile(model, (x,), mesh="tensor=2")
    assert isinstance(model.weight, DTensor)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"before sw.compile.* 'weight'.*optimizers=optimizer"):
        optimizer.step()
