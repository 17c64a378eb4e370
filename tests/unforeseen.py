"""Models as users write them, of kinds that the zoo has not: factories for `captured`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, ROWS = 16, 8
HERE = "shardweave.tests.unforeseen"

Inputs = dict[str, Tensor]


class Residual(nn.Module):
    """A block: a norm and two maps, added to what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Penalised(nn.Module):
    """A loss that adds the squares of all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        squares = [parameter.square().sum() for parameter in self.parameters()]
        return x.square().mean() + 0.01 * torch.stack(squares).sum()


def penalised() -> tuple[nn.Module, Inputs]:
    return Penalised(), {"x": torch.randn(ROWS, WIDTH)}


class Perceptron(nn.Module):
    """Two maps, no two modules of which do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(self.fc_in(x).relu()).square().mean()


def perceptron() -> tuple[nn.Module, Inputs]:
    return Perceptron(), {"x": torch.randn(ROWS, WIDTH)}
