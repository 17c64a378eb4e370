"""The norm of gradients over ranks: that of eager for every p, NaN and ranks without rows too."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.tests.compiled import compile_copy
from shardweave.tests.spawn import run_ranks

X = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(6, 5)


class Scored(nn.Module):
    """A map to 4 features, of which the last of three ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh().square().sum()


def norms() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Scored()
    stored = {"fc.weight": '[{"data"}, {}]', "fc.bias": '[{"data"}]'}
    step = compile_copy(model, (X,), mesh="data=3", plan=stored)
    step(X)
    model(X).backward()
    for p in (1.0, 2, 3.5, math.inf):
        found, expected = (
            nn.utils.clip_grad_norm_(module.parameters(), 1e9, p) for module in (step, model)
        )
        found = sw.full_tensor(found)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradient = step.fc.bias.grad
    assert isinstance(gradient, DTensor)
    local = gradient.to_local()
    assert len(local) == (2, 2, 0)[dist.get_rank()]
    if dist.get_rank() == 1:
        local[-1] = math.nan
    assert nn.utils.clip_grad_norm_(step.parameters(), 1.0, math.inf).isnan()
    assert all(tensor.isnan().all() for tensor in step.full_gradients().values())


def test_norm_over_shards_is_that_of_eager_and_keeps_nan() -> None:
    run_ranks(norms, 3)
