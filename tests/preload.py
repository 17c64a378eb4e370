"""What processes of tests have behind them when they begin; imported by the server that forks them.

Imports of torch and what it sets up the first time that a model is traced take seconds, which each
process would spend again.
"""

from __future__ import annotations

import importlib
import sys

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


def take_a_step() -> None:
    """Capture, partition and run a model, and leave no trace of it but what torch keeps."""
    with torch.random.fork_rng(devices=[]):
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
