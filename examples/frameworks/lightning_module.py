# pyright: reportMissingImports=false
"""Lightning on a mesh: two lines beside the same script for one process.

    torchrun --nproc-per-node 2 examples/frameworks/lightning_module.py data=2 --zero 3

Run again, it goes on from the last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import command
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardweave as sw


class Regression(lightning.LightningModule):
    def __init__(self, mesh: str | None, zero: int, dropout: float) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        if mesh:
            sw.compile(self.model, (rows()[:8][0],), mesh=mesh, zero=zero)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.model(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.get_default_dtype()
    x, y = (torch.randn(24, n, generator=generator, dtype=dtype) for n in (8, 4))
    return TensorDataset(x, y)


def train(
    mesh: str | None, zero: int, folder: Path, epochs: int = 2, *, dropout: float = 0.1
) -> tuple[Regression, list[float]]:
    lightning.seed_everything(0, verbose=False)
    module = Regression(mesh, zero, dropout)
    trainer = lightning.Trainer(
        strategy=sw.integrations.lightning.strategy("cpu") if mesh else "auto",
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, monitor="validation", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    train, check = DataLoader(rows(), 8, shuffle=True), DataLoader(rows(), 8)
    trainer.fit(module, train, check, ckpt_path=str(last) if last.exists() else None)
    (metrics,) = trainer.validate(module, check, verbose=False)
    return module, [*module.losses, metrics["validation"]]


if __name__ == "__main__":
    _, losses = command.run(train, "lightning")
    print(losses)
