"""Gradients that forward takes itself, by tensors that it marks: penalties, physics, guidance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardweave.tests.eager import assert_three_steps_equal_eager
from shardweave.tests.torch_versions import new_torch

pytestmark = new_torch("dynamo refuses requires_grad_()", since=(2, 12))

F64 = torch.float64


def net(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).to(F64)


class Penalised(nn.Module):
    """The gradient penalty of Gulrajani et al. (2017), at points between real and made ones."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.score = net(4), net(1)

    def forward(self, real: Tensor) -> tuple[Tensor, Tensor]:
        made = self.made(real.cos())
        share = torch.rand(len(real), 1, dtype=F64)
        between = (share * real + (1 - share) * made.detach()).requires_grad_(True)
        scores = self.score(between)
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.score(made).mean() - self.score(real).mean() + 10 * penalty, scores


class Physics(nn.Module):
    """The residual of the heat equation (Raissi et al. 2019): derivatives by inputs, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.field = net(1)

    def forward(self, points: Tensor) -> Tensor:
        x = points.detach()
        x.requires_grad_()
        slope = torch.autograd.grad(self.field(x).sum(), x, create_graph=True)[0]
        bend = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0]
        return (slope[:, 1] - 0.1 * bend[:, 0]).square().mean()


@pytest.mark.parametrize("model", [Penalised, Physics])
def test_gradient_by_a_tensor_that_forward_marks_equals_eager(
    model: Callable[[], nn.Module],
) -> None:
    assert_three_steps_equal_eager(model(), mesh="data=2,tensor=2")
