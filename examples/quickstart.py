"""Train any torch module, sharded: `python quickstart.py`, or on four processes
`torchrun --nproc-per-node 4 quickstart.py`."""

import os

import torch
from torch import Tensor, nn

import shardweave as sw


class Regression(nn.Module):
    """A module that returns its loss; nothing in it knows of meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.mlp(x), y)


torch.manual_seed(0)  # the same weights and data on every process
model, x = Regression(), torch.randn(32, 16)
batch = {"x": x, "y": x.sum(dim=1, keepdim=True)}

processes = int(os.environ.get("WORLD_SIZE", "1"))
mesh = sw.Mesh(data=processes // 2, tensor=2) if processes > 1 else None
step = sw.compile(model, kwargs=batch, mesh=mesh, plan="megatron")
optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
for _ in range(20):
    optimizer.zero_grad()
    loss = step(**batch)  # forward and backward: gradients are in .grad
    optimizer.step()
if os.environ.get("RANK", "0") == "0":
    print(f"{step.program!r}: loss {loss.item():.4f}")
