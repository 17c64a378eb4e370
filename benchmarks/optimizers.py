"""A step and its update beside FSDP2 and owners by hand: `python benchmarks/optimizers.py`

Processes with one core each train matrices in float32, stored in shards (ZeRO 3). A step is
forward, backward and the update. AdamW is beside `fully_shard` with torch's foreach and fused
forms. Muon is beside three others on the parameters of `fully_shard`. `everywhere` gathers each
gradient and computes all on every rank. `by hand` sends gradients to owners, dealt out by turns,
by one all-to-all, and updates back by another, as Dion and VeOmni do; owners keep the momentum.
`of DTensor` is torch.optim.Muon as it is, which trains on other values. Shown are the median time
of the slowest rank, and the bytes that rank 0 sends to others in an update, as far as the ranks'
collectives are all-to-alls, gathers and all-reduces. `--rate 250mbit` shapes each link in the
kernel (root, ip and tc). `--quick`: small sizes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import shaped_link
import torch
import torch.distributed as dist
from rank_processes import end_with, rows_of_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

RATE = 0.02


class Matrices(nn.Module):
    """Blocks of two matrices with a residual, as the MLPs of a transformer are."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                nn.GELU(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def newton_schulz(x: Tensor) -> Tensor:
    """torch.optim.Muon's iterations."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if is_tall else x


class ByHand(Optimizer):
    """Muon on `Shard(0)`, whose owners are dealt out by turns. everywhere: each rank is one."""

    def __init__(self, parameters: Sequence[Tensor], *, everywhere: bool) -> None:
        super().__init__(parameters, {"lr": RATE, "weight_decay": 0.1, "momentum": 0.95})
        self.everywhere = everywhere

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = self.param_groups[0]
        shards = [as_shard(p) for p in group["params"]]
        gradients = [as_shard(p.grad) for p in group["params"]]
        updates = self._everywhere(gradients) if self.everywhere else self._by_owners(gradients)
        for shard, update in zip(shards, updates, strict=True):
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update, alpha=-group["lr"])

    def _direction(self, index: int, gradient: Tensor) -> Tensor:
        group = self.param_groups[0]
        state = self.state[group["params"][index]]
        average = state.setdefault("momentum", torch.zeros_like(gradient))
        average.lerp_(gradient, 1 - group["momentum"])
        update = newton_schulz(gradient.lerp(average, group["momentum"]).bfloat16())
        return update * max(1.0, gradient.shape[0] / gradient.shape[1]) ** 0.5

    def _everywhere(self, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for index, gradient in enumerate(gradients):
            full = gradient.new_empty((ranks * gradient.shape[0], *gradient.shape[1:]))
            dist.all_gather_into_tensor(full, gradient.contiguous())
            yield self._direction(index, full).chunk(ranks)[rank]

    def _by_owners(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """One all-to-all there, one back; matrix i is owned by rank i modulo the ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = range(rank, len(gradients), ranks)
        counts = [sum(g.numel() for g in gradients[to::ranks]) for to in range(ranks)]
        sent = torch.cat([g.flatten() for to in range(ranks) for g in gradients[to::ranks]])
        received = sent.new_empty(ranks * counts[rank])
        dist.all_to_all_single(received, sent, [counts[rank]] * ranks, counts)
        pieces = [
            block.split([gradients[i].numel() for i in own]) for block in received.chunk(ranks)
        ]
        updates = [
            self._direction(i, torch.cat([p[at].view(gradients[i].shape) for p in pieces]))
            for at, i in enumerate(own)
        ]
        back = torch.cat([u.chunk(ranks)[to].flatten() for to in range(ranks) for u in updates])
        taken = back.new_empty(len(sent))
        dist.all_to_all_single(taken, back, counts, [counts[rank]] * ranks)
        order = [i for to in range(ranks) for i in range(to, len(gradients), ranks)]
        parts = taken.split([gradients[i].numel() for i in order])
        by_index = dict(zip(order, parts, strict=True))
        return [by_index[i].view(g.shape) for i, g in enumerate(gradients)]


def as_shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Rows

Row = tuple[nn.Module, Optimizer, Callable[[], Tensor]]


def ours(model: nn.Module, x: Tensor, make: Callable[..., Optimizer]) -> Row:
    import shardweave as sw

    module = sw.compile(
        copy.deepcopy(model), (x,), mesh=sw.Mesh(data=dist.get_world_size()), zero=3
    )
    optimizer = make(list(module.parameters()))

    def run() -> Tensor:
        loss = module(x)
        loss.backward()
        return loss.detach()

    return module, optimizer, run


def fsdp(model: nn.Module, x: Tensor, make: Callable[..., Optimizer]) -> Row:
    module: Any = copy.deepcopy(model)
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    optimizer = make(list(module.parameters()))
    own = x.chunk(dist.get_world_size())[dist.get_rank()]

    def run() -> Tensor:
        loss = module(own)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    return module, optimizer, run


def rows_of(model: nn.Module, x: Tensor) -> dict[str, Row]:
    def adamw(**form: Any) -> Callable[..., Optimizer]:
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **form)

    def muon(parameters: list[Tensor]) -> Optimizer:
        return torch.optim.Muon(parameters, lr=RATE)

    def by_hand(*, everywhere: bool) -> Callable[..., Optimizer]:
        return lambda parameters: ByHand(parameters, everywhere=everywhere)

    return {
        "AdamW foreach": ours(model, x, adamw(foreach=True)),
        "AdamW fused": ours(model, x, adamw(fused=True)),
        "AdamW foreach, FSDP2": fsdp(model, x, adamw(foreach=True)),
        "AdamW fused, FSDP2": fsdp(model, x, adamw(fused=True)),
        "Muon": ours(model, x, muon),
        "Muon by hand, FSDP2": fsdp(model, x, by_hand(everywhere=False)),
        "Muon everywhere, FSDP2": fsdp(model, x, by_hand(everywhere=True)),
        "Muon of DTensor, FSDP2": fsdp(model, x, muon),
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collects the bytes that this rank sends to others by the collectives of updates."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sent: list[int] = []
    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(func)
            if "alltoall_base" in name or "all_to_all_single" in name:
                given, splits = (args[1], args[4]) if "alltoall" in name else (args[0], args[2])
                own = splits[rank] if splits else len(given) // ranks
                width = given.numel() // max(len(given), 1) * given.element_size()
                sent.append((len(given) - own) * width)
            elif "allgather_base" in name or "all_gather_into_tensor" in name:
                given = args[1] if "allgather" in name else args[0]
                sent.append(given.numel() * given.element_size() * (ranks - 1))
            elif "allreduce" in name or "all_reduce" in name:
                given = args[0][0] if isinstance(args[0], list) else args[0]
                sent.append(2 * given.numel() * given.element_size() * (ranks - 1) // ranks)
            return func(*args, **(kwargs or {}))

    with Counter():
        yield sent


def measure(rows: dict[str, Row], rounds: int) -> list[dict[str, Any]]:
    """The rows in turn: median seconds of the slowest rank, bytes of an update, and the loss."""
    times: dict[str, list[list[float]]] = {name: [] for name in rows}
    told: dict[str, dict[str, Any]] = {}
    for turn in range(rounds + 2):
        for name, (module, optimizer, run) in rows.items():
            module.zero_grad(set_to_none=True)
            dist.barrier()
            start_s = time.perf_counter()
            loss = run()
            between_s = time.perf_counter()
            if turn == 1:
                with counted() as sent:
                    optimizer.step()
                told[name] = {"sent_bytes": sum(sent)}
            else:
                optimizer.step()
            end_s = time.perf_counter()
            taken = torch.tensor([end_s - start_s, end_s - between_s])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if turn > 1:
                times[name].append(taken.tolist())
            told.setdefault(name, {})["loss"] = float(loss)
    for name, pairs in times.items():
        step_s, update_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        told[name] |= {"row": name, "seconds": step_s, "update_s": update_s}
    return list(told.values())


def work(settings: dict[str, Any]) -> None:
    """One rank: all rows, in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Matrices(settings["width"], settings["blocks"])
    x = torch.randn(settings["rows"], settings["width"])
    rows = measure(rows_of(model, x), settings["rounds"])
    end_with(rows, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="how many processes, in turn")
    parser.add_argument("--rate", default="", help="rate of each link, such as 250mbit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    size = {"width": 256, "blocks": 4, "rows": 256}
    if options.quick:
        size = {"width": 32, "blocks": 2, "rows": 32}
    settings = size | {"rounds": 2 if options.quick else options.rounds}
    counts = [int(ranks) for ranks in options.ranks.split(",")]
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    with shaped_link.shaped_link(max(counts), options.rate):
        for ranks in counts:
            rows = rows_of_ranks(Path(__file__), settings, ranks, options.rate, timeout_s=900)
            for row in rows:
                print(f"{ranks} ranks {options.rate:8} {line_of(row)}")
            known += [{"ranks": ranks, "rate": options.rate} | size | row for row in rows]
    if options.json:
        options.json.write_text(json.dumps(known, indent=1) + "\n")
    return 0


def line_of(row: dict[str, Any]) -> str:
    times = f"step {row['seconds'] * 1e3:8.1f} ms  update {row['update_s'] * 1e3:8.1f} ms"
    return f"{row['row']:23} {times}  {row['sent_bytes'] / 1e6:7.3f} MB  loss {row['loss']:.6f}"


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("--"):
        work(json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
