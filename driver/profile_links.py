"""Times of collectives between the processes of this machine, and what they cost compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.driver.profile_ops import Points

SIZES = (2**10, 2**15, 2**18, 2**20, 2**22, 2**24)
"""Bytes of a rank's operand."""

SECONDS = 0.4
"""How long one kind of one size is repeated, about."""

LONGEST_S = 0.5
"""No larger collective is tried after one that took this long."""

OVERLAP_S = 0.15
"""About how long the collective is whose overlap with compute is measured."""

Start = Callable[[], Any]


def measure_collectives(group: dist.ProcessGroup, ranks: int) -> dict[str, Points]:
    """(bytes of a rank's operand, seconds) by kind, in groups of `ranks`. Collective."""
    found: dict[str, Points] = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for size in SIZES:
            seconds = _time_s(_starter(kind, size, group, ranks))
            found.setdefault(kind, []).append((float(size), seconds))
            if seconds > LONGEST_S:
                break
    return found


def _starter(kind: str, size: int, group: dist.ProcessGroup, ranks: int) -> Start:
    """A function that starts one collective on `size` bytes of float32 a rank."""
    x = torch.ones(size // 4)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(x, group=group, async_op=True)
    if kind == "broadcast":
        first = dist.get_process_group_ranks(group)[0]
        return lambda: dist.broadcast(x, src=first, group=group, async_op=True)
    if kind == "all_gather":
        whole = torch.empty(ranks * x.numel())
        return lambda: _gather(whole, x, group=group, async_op=True)
    if kind == "reduce_scatter":
        x = torch.ones(max(1, x.numel() // ranks) * ranks)
        part = torch.empty(x.numel() // ranks)
        return lambda: _scatter(part, x, group=group, async_op=True)
    x = torch.ones(max(1, x.numel() // ranks) * ranks)
    received = torch.empty_like(x)
    return lambda: dist.all_to_all_single(received, x, group=group, async_op=True)


# torch 2.13 deprecates the older names, which are all that 2.11 has.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _time_s(start: Start) -> float:
    """Median seconds from start to arrival on the slowest rank. Collective."""
    start().wait()
    first_s = _slowest([_once(start)])[0]
    rounds = max(2, min(15, int(SECONDS / first_s)))
    return statistics.median(_slowest([_once(start) for _ in range(rounds)]))


def _once(start: Start) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    start().wait()
    return time.perf_counter() - start_s


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Each of several times on the rank where it was longest. Collective."""
    all_s = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(all_s, dist.ReduceOp.MAX)
    return all_s.tolist()


def measure_start(group: dist.ProcessGroup) -> tuple[float, float]:
    """What starting an all-reduce of a copy costs: seconds, and bytes per second. Collective."""
    found: list[float] = []
    sizes = (2**10, 2**22)
    for size in sizes:
        x = torch.ones(size // 4)
        each: list[float] = []
        for _ in range(5):
            dist.barrier()
            start_s = time.perf_counter()
            work = dist.all_reduce(x.clone(), group=group, async_op=True)
            each.append(time.perf_counter() - start_s)
            assert work is not None
            work.wait()
        found.append(statistics.median(each))
    per_byte = max(0.0, found[1] - found[0]) / (sizes[1] - sizes[0])
    return found[0], 1 / per_byte if per_byte else 0.0


def measure_overlap(group: dist.ProcessGroup, all_reduce: Points) -> tuple[float, float]:
    """How many times longer compute takes beside an all-reduce, and the other way round.

    Collective.
    """
    bytes_s = all_reduce[-1][0] / all_reduce[-1][1]
    size = min(2**26, max(2**20, int(bytes_s * OVERLAP_S)))
    x = torch.ones(size // 4)
    left, right = torch.randn(256, 512), torch.randn(512, 512)
    reduce_s = _time_s(lambda: dist.all_reduce(x, group=group, async_op=True))
    compute: list[float] = []
    communication: list[float] = []
    # In turn, and means over equal spans: so what else the machine does weighs on both alike.
    for _ in range(5):
        alone_s = _alone(reduce_s, left, right)
        beside_s, all_s = _overlapped(x, group, left, right)
        compute.append(beside_s / alone_s)
        communication.append(_slowest([all_s])[0] / reduce_s)
    return max(1.0, statistics.median(compute)), max(1.0, statistics.median(communication))


def _alone(span_s: float, left: Tensor, right: Tensor) -> float:
    """Mean seconds of a product, repeated for a while."""
    dist.barrier()
    start_s = time.perf_counter()
    products = 0
    while time.perf_counter() - start_s < span_s or not products:
        torch.mm(left, right)
        products += 1
    return (time.perf_counter() - start_s) / products


def _overlapped(
    x: Tensor, group: dist.ProcessGroup, left: Tensor, right: Tensor
) -> tuple[float, float]:
    """Mean seconds of a product while an all-reduce is under way, and those of the all-reduce."""
    dist.barrier()
    start_s = time.perf_counter()
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    products = 0
    first_s = time.perf_counter()
    while not work.is_completed():
        torch.mm(left, right)
        products += 1
    end_s = time.perf_counter()
    work.wait()
    return (end_s - first_s) / max(1, products), end_s - start_s
