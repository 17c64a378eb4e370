"""A script written for DistributedDataParallel: each rank reads its own rows. One line differs.

torchrun --nproc-per-node 2 examples/frameworks/ddp_script.py --mesh data=2 --zero 3

Without --mesh it wraps the model in DDP, as it did.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardweave as sw


def rows() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=made, dtype=torch.get_default_dtype())
    return TensorDataset(x, torch.randint(4, (32,), generator=made))


def train(mesh: str | None, zero: int, epochs: int = 2) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    data = rows()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    if mesh:
        model = sw.compile(model, next(iter(loader))[:1], mesh=mesh, zero=zero, batch="local")
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            is_last = number % 2 == 1
            with nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
                loss = nn.functional.cross_entropy(model(x), y) / 2
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)  # the mean over ranks, to be logged
            losses.append(2 * total.item() / dist.get_world_size())
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh")
    parser.add_argument("--zero", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    _, losses = train(options.mesh, options.zero)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
