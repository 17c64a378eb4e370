"""Experts whose tokens travel, beside the same by hand: `python benchmarks/experts.py`

Processes with one core each train a router and gated experts, in float32, with their tokens and
experts spread over all. `sent` is the step of sw.compile, `gathered` the same with tokens gathered.
`by hand` follows torchtitan's all-to-all dispatcher: each rank sorts its tokens by
expert, sends counts, then rows by all_to_all_single with uneven splits, takes torch's grouped
products, and sends rows back. Shown are the loss, the slowest rank's median time, the bytes that
rank 0 sends to others by all-to-all, and the FLOPs of its matrix products, as a multiple of those
of the tokens that are routed to it. `--rate 250mbit` shapes each process's link in the kernel
(root, ip and tc). `--imbalanced` routes all tokens to the experts of rank 0. `--quick`: small
sizes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import shaped_link
import torch
import torch.distributed as dist
from rank_processes import end_with, rows_of_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


class Experts(nn.Module):
    """A router and gated experts, which take all tokens that are routed to them."""

    def __init__(self, hidden: int, inner: int, count: int, choices: int) -> None:
        super().__init__()
        self.count, self.choices = count, choices
        self.router = nn.Linear(hidden, count, bias=False)
        self.gate = nn.Parameter(torch.randn(count, hidden, inner) / hidden**0.5)
        self.up = nn.Parameter(torch.randn(count, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(count, inner, hidden) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.choices)
        expert, order = chosen.view(-1).sort(stable=True)
        token = order // self.choices
        counts = torch.histc(expert.float(), bins=self.count, min=0, max=self.count - 1)
        out = self.products(x[token], counts.cumsum(0, dtype=torch.int32))
        out = out * weights.view(-1)[order][:, None]
        added = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, x.shape[1]), out)
        return (x + added).square().mean()

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner = F.silu(grouped_mm(rows, self.gate, offs=ends))
        return grouped_mm(inner * grouped_mm(rows, self.up, offs=ends), self.down, offs=ends)


class Exchange(torch.autograd.Function):
    """Rows by uneven splits; their gradients by the same, back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, received = ctx.splits
        out = grad.new_empty((sum(sent), *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class ByHand(Experts):
    """The same on a rank's own tokens, with its own experts."""

    def forward(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        weights, chosen = self.router(x).softmax(-1).topk(self.choices)
        expert, order = chosen.view(-1).sort(stable=True)
        token = order // self.choices
        counts = torch.histc(expert.float(), bins=self.count, min=0, max=self.count - 1).long()
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = told.view(ranks, -1).sum(1).tolist()
        rows = Exchange.apply(x[token], sent, received)
        own = torch.arange(self.count // ranks).repeat(ranks).repeat_interleave(told)
        by_expert = own.argsort(stable=True)
        ends = told.view(ranks, -1).sum(0).cumsum(0, dtype=torch.int32)
        out = self.products(rows[by_expert], ends)
        out = Exchange.apply(torch.empty_like(out).index_copy(0, by_expert, out), received, sent)
        out = out * weights.view(-1)[order][:, None]
        added = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, x.shape[1]), out)
        return (x + added).square().mean() / ranks


def by_hand(model: Experts, x: Tensor) -> Callable[[], Tensor]:
    """A step of this rank: its experts and tokens, and the sum of the router's gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = ByHand(x.shape[1], 1, model.count, model.choices)
    made.router.load_state_dict(model.router.state_dict())
    for name in ("gate", "up", "down"):
        setattr(made, name, nn.Parameter(getattr(model, name).detach().chunk(ranks)[rank].clone()))
    own = x.chunk(ranks)[rank]

    def step() -> Tensor:
        made.zero_grad(set_to_none=True)
        loss = made(own)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(made.router.weight.grad)
        dist.all_reduce(total)
        return total

    return step


def compiled(model: Experts, x: Tensor, mode: str) -> Callable[[], Tensor]:
    """A step of sw.compile whose tokens travel, or are gathered."""
    import shardweave as sw
    from shardweave.passes.presets import PRESETS

    passes = PRESETS["partition"].replace("dispatch-experts", f'dispatch-experts{{mode="{mode}"}}')
    program = sw.capture(model, (x,))
    mesh = sw.Mesh(expert=dist.get_world_size())
    plan = sw.plan(program, mesh, "megatron")
    plan = replace(plan, passes=f"{passes},start-collectives")
    made = sw.compile(copy.deepcopy(model), (x,), plan=plan, backward="in_call")

    def step() -> Tensor:
        made.zero_grad(set_to_none=True)
        return made(x)

    return step


def routed_flops(model: Experts, x: Tensor) -> int:
    """FLOPs of this rank's share of the router, and of the rows that its experts take."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chosen = model.router(x).topk(model.choices).indices
    rows = int((chosen * ranks // model.count == rank).sum())
    router = 2 * 2 * x.shape[0] // ranks * model.router.weight.numel()
    products = 3 + 3 + 1  # forward, of weights, and of the rows that have gradients
    return router + products * 2 * rows * model.gate[0].numel()


class Flops(TorchDispatchMode):
    """Counts the FLOPs of matrix products."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if func is torch.ops.aten._grouped_mm.default:
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def measure(step: Callable[[], Tensor], rounds: int) -> dict[str, float]:
    """Median seconds of the slowest rank, bytes that all-to-all sends from here, FLOPs of products
    that are counted here, and the loss."""
    sent = 0
    plain = dist.all_to_all_single

    def counted(out: Tensor, x: Tensor, *splits: Any, **named: Any) -> Any:
        nonlocal sent
        given = splits[1] if len(splits) > 1 else None
        width = x.element_size() * (x.numel() // max(x.shape[0], 1))
        rows = sum(given) - given[dist.get_rank()] if given else x.shape[0]
        sent += rows * width
        return plain(out, x, *splits, **named)

    dist.all_to_all_single = counted
    try:
        loss = step().item()
    finally:
        dist.all_to_all_single = plain
    with Flops() as products:
        step()
    times: list[float] = []
    for _ in range(rounds):
        dist.barrier()
        start_s = time.perf_counter()
        step()
        taken = torch.tensor(time.perf_counter() - start_s)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        times.append(taken.item())
    return {
        "seconds": statistics.median(times), "sent_bytes": sent, "loss": loss,
        "flops": products.total,
    }  # fmt: skip


def work(settings: dict[str, Any]) -> None:
    """One rank: all ways, in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden, inner, experts = (settings[key] for key in ("hidden", "inner", "experts"))
    model = Experts(hidden, inner, experts, settings["choices"])
    x = torch.randn(settings["tokens"], hidden)
    if settings["imbalanced"]:
        x[:, 0] = 1
        with torch.no_grad():
            model.router.weight[: settings["choices"], 0] += 100
    routed = routed_flops(model, x)
    ways = {
        "by hand": by_hand(model, x),
        "sent": compiled(model, x, "all-to-all"),
        "gathered": compiled(model, x, "gather"),
    }
    about = {"routed_flops": routed}
    rows = [
        {"way": name, **about, **measure(step, settings["rounds"])} for name, step in ways.items()
    ]
    end_with(rows, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="", help="rate of each link, such as 250mbit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--imbalanced", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    size = {"tokens": 2048, "hidden": 512, "inner": 512, "experts": 8, "choices": 2}
    if options.quick:
        size |= {"tokens": 256, "hidden": 64, "inner": 64}
    size["imbalanced"] = options.imbalanced
    settings = size | {"rounds": 2 if options.quick else options.rounds}
    with shaped_link.shaped_link(options.ranks, options.rate):
        rows = rows_of_ranks(Path(__file__), settings, options.ranks, options.rate, timeout_s=600)
    hand = rows[0]["seconds"]
    for row in rows:
        times = f"{row['seconds'] * 1e3:8.1f} ms {row['seconds'] / hand:5.2f}"
        sent = f"{row['sent_bytes'] / 1e6:7.2f} MB  {row['loss']:.6f}"
        flops = f"{row['flops'] / row['routed_flops']:.3f} of the FLOPs"
        print(f"{options.ranks} ranks {options.rate:8} {row['way']:9} {times}  {sent}  {flops}")
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        about = {"ranks": options.ranks, "rate": options.rate} | size
        options.json.write_text(
            json.dumps([*known, *(about | row for row in rows)], indent=1) + "\n"
        )
    losses = [row["loss"] for row in rows]
    return int(max(losses) - min(losses) > 1e-4 * abs(losses[0]))


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("--"):
        work(json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
