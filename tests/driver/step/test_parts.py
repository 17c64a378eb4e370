"""A plan on parts of an axis: two key heads on four devices are sharded over one part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardweave as sw
from shardweave.driver.training.checkpoints import load_checkpoint, save_checkpoint
from shardweave.tests.spawn import run_ranks


class Attention(nn.Module):
    """Four query heads of size 4 that share two key heads, and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.q, self.k, self.v = (nn.Linear(16, size) for size in (16, 8, 8))
        self.o = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).square().mean()


def train(mesh: str, save: str = "", load: str = "", backend: str = "distributed") -> list[float]:
    """Losses of two steps, then of one in evaluation mode with more rows, and of another step."""
    torch.manual_seed(0)
    model, x = Attention().double(), torch.randn(2, 8, 16, dtype=torch.float64)
    if mesh:
        plan = sw.plan(sw.capture(model, (x,)), mesh, "megatron")
        if mesh == "tensor=4":
            plan = replace(plan, mesh={"tensor.0": 2, "tensor.1": 2})
        sw.compile(model, (x,), mesh=mesh, plan=plan, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    if load:
        assert load_checkpoint(load, state) is not None

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [] if load else [step(), step()]
    if save:
        save_checkpoint(save, 2, state)
        own = [p.to_local().shape[0] for p in model.parameters() if isinstance(p, DTensor)]
        assert own == [8, 8, 4, 4, 4, 4, 4, 4, 16]  # norm, then q, k and v with biases, and o
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.cat([x, x, 2 * x])).item())
    model.train()
    return [*losses, step()]


def test_keys_are_stored_over_a_part_and_checkpoints_fit_other_meshes(tmp_path: Path) -> None:
    folder, wanted = str(tmp_path), torch.tensor(train(""), dtype=torch.float64)
    for losses in run_ranks(train, 4, "tensor=4", folder):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), wanted)
    for losses in run_ranks(train, 2, "tensor=2", "", folder):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), wanted[2:])
    alone = train("tensor=4", load=folder, backend="reference")
    torch.testing.assert_close(torch.tensor(alone, dtype=torch.float64), wanted[2:])
