"""The loop of quickstart_eager.py on a mesh, here of four processes:
`torchrun --nproc-per-node 4 quickstart.py data=2,tensor=2`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import shardweave as sw


class Regression(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.mlp(x), y)


torch.manual_seed(0)
model, x = Regression(), torch.randn(32, 16)
y = x.sum(dim=1, keepdim=True)
model = sw.compile(model, (x, y), mesh=sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(20):
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(f"loss {loss.item():.4f}")
