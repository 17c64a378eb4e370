"""Train a small GPT on the bytes of a Python file, sharded: `python train.py` on one process, or
`torchrun --nproc-per-node 4 train.py --mesh data=-1,tensor=2` on four.

`train_eager.py` is the same training in plain PyTorch.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import shardweave as sw

SEQ = 64  # bytes that the model sees at once
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    """A pre-norm transformer layer. Shapes: batch x seq x hidden -> the same."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc_in, self.fc_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.fc_out(F.gelu(self.fc_in(self.norm_2(x)))))


class GPT(nn.Module):
    """Predicts the next byte; its loss is the mean cross entropy, in nats per byte."""

    def __init__(self, dropout: float, layers: int = 4, hidden: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, hidden), nn.Embedding(SEQ, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.bytes(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text and, as labels, the bytes that follow each."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQ

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * SEQ : (index + 1) * SEQ + 1]
        return window[:-1], window[1:]


def batch_order(num_samples: int, batch: int, start: int) -> Iterator[list[int]]:
    """Samples of each batch, shuffled anew in each epoch, from batch number `start` on."""
    for number in itertools.count(start):
        epoch, index = divmod(number, num_samples // batch)
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
        yield order[index * batch : (index + 1) * batch].tolist()


def evaluate(model: nn.Module, batches: DataLoader[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [model(ids, labels).item() for ids, labels in batches]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--precision", default="bf16", help="'': that of the parameters")
    parser.add_argument("--show-every", type=int, default=10, help="steps between lines")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints"))
    parser.add_argument("--mesh", default="data=-1", help="-1: all processes that are left")
    parser.add_argument("--cluster", help="its file, to see what the simulator predicts")
    options = parser.parse_args()

    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    train, held_out = Text(text[: len(text) * 9 // 10]), Text(text[len(text) * 9 // 10 :])
    validation = DataLoader(held_out, options.batch // options.accumulate, drop_last=True)

    torch.manual_seed(0)
    model = GPT(options.dropout).to(DEVICE)
    example = next(iter(validation))
    model = sw.compile(model, example, mesh=options.mesh, precision=options.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    sw.load_checkpoint(options.checkpoint, parts)
    start = schedule.last_epoch  # steps that were taken
    progress = sw.Progress(
        model,
        options.steps,
        every=options.show_every,
        accumulate=options.accumulate,
        cluster=options.cluster,
    )
    progress.say(f"starting after step {start} of {options.steps}")
    batches = DataLoader(train, batch_sampler=batch_order(len(train), options.batch, start))
    for number, (ids, labels) in zip(range(start + 1, options.steps + 1), batches, strict=False):
        optimizer.zero_grad()
        loss = torch.zeros((), device=DEVICE)
        for part in zip(*(x.chunk(options.accumulate) for x in (ids, labels)), strict=True):
            micro_loss = model(*part) / options.accumulate
            micro_loss.backward()
            loss += micro_loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(number, loss, ids.numel())
        if number % options.save_every == 0 or number == options.steps:
            progress.say(f"validation loss {evaluate(model, validation):.4f}")
            sw.save_checkpoint(options.checkpoint, number, parts, keep=2)


if __name__ == "__main__":
    main()
