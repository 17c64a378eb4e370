"""One number of a whole tensor, and ops on each row: shards send no more than that number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardweave.tests.compiled import compile_copy
from shardweave.tests.eager import Model, rows
from shardweave.tests.torch_versions import new_torch

Function = Callable[[Any, Tensor], Tensor]


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.linear(x).norm(),
        lambda self, x: torch.linalg.vector_norm(self.linear(x), keepdim=True).sum(),
        lambda self, x: self.linear(x).min() + self.linear(x).amin() + self.linear(x).amax(),
        pytest.param(
            lambda self, x: sum(self.linear(x).aminmax()),
            marks=new_torch("aminmax has no derivative", (2, 12)),
        ),
        lambda self, x: torch.where(x > 0, torch.nan, self.linear(x)).nansum(),
        lambda self, x: (self.linear(x) * 9).long().min() + self.linear(x).sum(),
        lambda self, x: self.linear(x)[:, None].expand(-1, 4, -1).diagonal(0, 1, 2).square().sum(),
        lambda self, x: torch.diag_embed(self.linear(x)).inverse().sum(),
        lambda self, x: torch.linalg.det(self.linear(x)[:, :, None] * x[:, None] + self.eye).sum(),
        lambda self, x: torch.linalg.cross(self.linear(x)[:, :3], x[:, 1:]).square().sum(),
        lambda self, x: self.linear(x).unfold(1, 2, 1).square().sum(),
        lambda self, x: F.grid_sample(
            self.linear(x).view(4, 1, 2, 2), x.view(4, 1, 2, 2), align_corners=False
        ).sum(),
        lambda self, x: F.interpolate(
            self.linear(x).view(4, 1, 2, 2), (3, 1), mode="bilinear", antialias=True
        ).sum(),
        lambda self, x: torch.cdist(self.linear(x)[:, None], x[:, None]).sum(),
        lambda self, x: torch.logaddexp2(self.linear(x), x).sum(),
    ],
    ids="norm vector_norm min aminmax nansum integers diagonal inverse det cross unfold grid "
    "antialias cdist tag".split(),
)
def test_rows_stay_where_they_are(function: Function) -> None:
    model = Model(function, eye=torch.nn.Parameter(torch.eye(4, dtype=torch.float64)))
    (x,) = rows()
    x = x + torch.linspace(0, 1, 16, dtype=torch.float64).view(4, 4)
    step = compile_copy(model, (x,), mesh="data=2", backend="reference")
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(step(x).detach(), loss.detach())
    found = step.full_gradients()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad)
    assert {one.kind for one in step.program.stats().collectives} == {"all_reduce"}
