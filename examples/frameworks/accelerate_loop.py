# pyright: reportMissingImports=false
"""A loop with accelerate on a mesh: two lines beside the same loop for one process.

torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py data=2 --zero 3
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import command
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardweave as sw


class Classifier(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.body(x))))


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator, dtype=torch.get_default_dtype())
    return TensorDataset(x, torch.randint(4, (24,), generator=generator))


def train(
    mesh: str | None,
    zero: int,
    folder: Path,
    epochs: int = 2,
    *,
    dropout: float = 0.1,
    **options: Any,
) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = Classifier(dropout)
    kind: type[Accelerator] = Accelerator
    if mesh:
        sw.compile(model, (rows()[:8][0],), mesh=mesh, zero=zero)
        kind = sw.integrations.accelerate.accelerator(Accelerator)
    accelerator = kind(cpu=True, gradient_accumulation_steps=2, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(rows(), batch_size=8, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    accelerator.register_for_checkpointing(schedule)
    if folder.exists():
        accelerator.load_state(str(folder))
    numbers: list[float] = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    numbers.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            numbers.append(loss.item())
    model.eval()
    right = torch.zeros(0)
    for x, y in loader:
        with torch.no_grad():
            predicted = model(x).argmax(-1)
        gathered: Any = accelerator.gather_for_metrics(predicted == y)
        right = torch.cat([right, gathered])
    numbers += [right.float().mean().item(), float(len(right))]
    accelerator.save_state(str(folder))
    accelerator.save_model(model, str(folder / "weights"))
    accelerator.print(f"loss {numbers[-3]:.4f}, right {numbers[-2]:.2f} of {len(right)}")
    return model, numbers


if __name__ == "__main__":
    command.run(train, "accelerated")
