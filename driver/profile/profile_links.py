"""Times of collectives between this machine's processes, and how much they slow compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.backends.distributed.in_flight import (
    Group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from shardweave.driver.profile.profile_gpu import is_on_gpu
from shardweave.driver.profile.profile_ops import Points

SIZES = (2**10, 2**15, 2**18, 2**20, 2**22, 2**24)
"""Bytes of a rank's operand."""

SECONDS = 0.4
"""Approximate seconds for which a collective of one size is repeated."""

LONGEST_S = 0.5
"""Seconds of a collective after which no larger one is measured."""

OVERLAP_S = 0.15
"""Approximate seconds of the collective whose overlap with compute is measured."""

MESSAGES = 50
"""Number of messages timed for each size."""

Start = Callable[[], Any]


def measure_collectives(group: dist.ProcessGroup, ranks: int) -> dict[str, Points]:
    """Measure collectives among `ranks` ranks: (operand bytes, seconds) by kind. Collective."""
    points: dict[str, Points] = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for size in SIZES:
            seconds = _time_s(_starter(kind, size, group, ranks))
            points.setdefault(kind, []).append((float(size), seconds))
            if seconds > LONGEST_S:
                break
    return points


def _starter(kind: str, size: int, group: dist.ProcessGroup, ranks: int) -> Start:
    """Return a function that starts a collective on `size` bytes of float32 on each rank."""
    x = torch.ones(size // 4)
    even = torch.ones(max(1, x.numel() // ranks) * ranks)
    members = dist.get_process_group_ranks(group)
    own = Group(group, tuple(members), tuple(range(ranks)))
    options: dict[str, Any] = {"group": group, "async_op": True}
    calls: dict[str, Start] = {
        "all_reduce": partial(start_all_reduce, x, own, "sum", in_place=True),
        "all_gather": partial(start_all_gather, x, own, 0, x.numel()),
        "reduce_scatter": partial(start_reduce_scatter, even, own, 0, even.numel() // ranks),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(even), even, **options),
    }
    return calls[kind]


def _time_s(start: Start) -> float:
    start().wait()
    first_s = _slowest([_once(start)])[0]
    rounds = max(2, min(15, int(SECONDS / first_s)))
    return statistics.median(_slowest([_once(start) for _ in range(rounds)]))


def _once(start: Start) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    start().wait()
    _finish()
    return time.perf_counter() - start_s


def _finish() -> None:
    """Wait for the work queued on the GPU, if there is one; the CPU has no queue."""
    if is_on_gpu():
        torch.cuda.synchronize()


def _slowest(seconds: Sequence[float]) -> list[float]:
    all_s = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(all_s, dist.ReduceOp.MAX)
    return all_s.tolist()


def measure_start(group: dist.ProcessGroup) -> tuple[float, float]:
    """Measure the start of an all-reduce of a copy: seconds, and bytes per second. Collective."""
    medians: list[float] = []
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
        medians.append(statistics.median(each))
    per_byte = max(0.0, medians[1] - medians[0]) / (sizes[1] - sizes[0])
    return medians[0], 1 / per_byte if per_byte else 0.0


def measure_message() -> tuple[float, float]:
    """Measure the work at each end of a message between two ranks: seconds, and bytes per second.
    It is processor time of the thread that computes, without its waits. Collective."""
    sizes = (2**10, 2**17)
    times = [_end_s(torch.ones(size // 4)) for size in sizes]
    per_byte = max(0.0, times[1] - times[0]) / (sizes[1] - sizes[0])
    return times[0], 1 / per_byte if per_byte else 0.0


def _end_s(x: Tensor) -> float:
    """Median processor time, in seconds, of sending a tensor to the next rank and receiving one
    from the previous rank, halved; averaged over ranks. Collective."""
    rank, count = dist.get_rank(), dist.get_world_size()
    goal, source = (rank + 1) % count, (rank - 1) % count
    each: list[float] = []
    for _ in range(MESSAGES):
        dist.barrier()
        start_s = time.thread_time()
        sent, come = dist.isend(x, goal), dist.irecv(torch.empty_like(x), source)
        assert sent is not None
        assert come is not None
        come.wait()
        each.append((time.thread_time() - start_s) / 2)
        sent.wait()
    middle_s = torch.tensor(statistics.median(each), dtype=torch.float64)
    dist.all_reduce(middle_s)
    return float(middle_s) / count


def measure_overlap(group: dist.ProcessGroup, all_reduce: Points) -> tuple[float, float]:
    """Measure the slowdown of compute beside an all-reduce, and the reverse. Collective."""
    bytes_s = all_reduce[-1][0] / all_reduce[-1][1]
    size = min(2**26, max(2**20, int(bytes_s * OVERLAP_S)))
    x = torch.ones(size // 4)
    left, right = torch.randn(256, 512), torch.randn(512, 512)
    reduce = partial(dist.all_reduce, x, group=group, async_op=True)
    reduce_s = _time_s(reduce)
    compute: list[float] = []
    communication: list[float] = []
    # In turn, and means over equal spans, so that other load on the machine affects both alike.
    for _ in range(5):
        dist.barrier()
        end_s = time.perf_counter() + reduce_s
        alone_s = _product_s(lambda end_s=end_s: time.perf_counter() >= end_s, left, right)
        dist.barrier()
        start_s = time.perf_counter()
        work = reduce()
        assert work is not None
        compute.append(_product_s(work.is_completed, left, right) / alone_s)
        communication.append(_slowest([time.perf_counter() - start_s])[0] / reduce_s)
        work.wait()
    return max(1.0, statistics.median(compute)), max(1.0, statistics.median(communication))


def _product_s(is_over: Callable[[], bool], left: Tensor, right: Tensor) -> float:
    """Mean seconds of a matrix product, repeated until `is_over` returns True."""
    start_s = time.perf_counter()
    products = 0
    while not products or not is_over():
        torch.mm(left, right)
        _finish()
        products += 1
    return (time.perf_counter() - start_s) / products
