"""What processes of tests have behind them when they begin; imported by the server that forks them.

Imports of torch and what it sets up the first time that a model is traced take seconds, which each
process would spend again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardweave.driver.step.compile import compile as compile_step
from shardweave.tests.garbage import look_rarely

MODULES = (
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "shardweave.tests.spawn",
    "shardweave.tests.warm",
)


class Small(nn.Module):
    """A model with most of what the models of tests have."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu()).square().mean()


def no_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients as `torch.autograd.grad` returns them, all zero."""
    return tuple(map(torch.zeros_like, inputs))


def take_a_step() -> None:
    """Capture, partition and run a model, and leave no trace of it but what torch keeps.

    Autograd does not run: where torch knows a GPU, as in every CUDA build, that starts threads, and
    a process forked after that can run no backward pass.
    """
    without_autograd = mock.patch.object(torch.autograd, "grad", no_gradients)
    with torch.random.fork_rng(devices=[]), without_autograd:
        x = torch.ones(2, 2)
        compile_step(Small(), (x,), mesh="data=2", backend="reference")(x)


def forget_triton() -> None:
    """Let processes import Triton again, if they do: its own functions are interpreted only if the
    environment says so when they are made."""
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]


for name in MODULES:
    importlib.import_module(name)
take_a_step()
forget_triton()
look_rarely()
