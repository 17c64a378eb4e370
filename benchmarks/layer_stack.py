"""The step of a stack of transformer layers, as papers measure them: without embedding and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.driver.models.gpt import Block, GPTConfig
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program


class LayerStack(nn.Module):
    """Layers alone. Shapes: batch x seq x hidden -> scalar."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


def step_of_layers(config: GPTConfig) -> Program:
    """The global program of a step of a stack, with fake weights in torch's default dtype."""
    with FakeTensorMode():
        module = LayerStack(config)
        x = torch.empty(config.batch, config.seq, config.hidden)
    return capture(module, kwargs={"x": x})
