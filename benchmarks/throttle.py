"""A process held to a share of a core, as if its device were slower."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from timed_rows import TimedRow
from torch.distributed.pipelining import schedules as pytorch

from shardweave.backends.distributed import in_flight
from shardweave.backends.distributed.mail import Mail
from shardweave.backends.distributed.pipeline import RankStep
from shardweave.backends.stages import Place, Slots
from shardweave.ir.program.staged import Run
from shardweave.planners.cost.cluster import Cluster, DeviceType

SCHEDSTAT = Path("/proc/thread-self/schedstat")

THERE_S = 2e-4
"""A message that is waited for no longer was there: taking one takes half of it."""


class Throttle:
    """Lets what this thread computes take `factor` times its processor time.

    It sleeps before each message leaves, before each is waited for, and before what runs once in a
    step, for as long as the device would still compute; no more often, since it finds the core's
    caches cold when it wakes. What other processes on the core take
    meanwhile counts as sleep, so that `factor` of them and more can share a core and keep their
    speeds. If for once they take longer, the device is ahead by as much, and what comes next
    catches up, until the device would wait itself.

    worked_s: processor time. lost_s: how far the device was ahead when it began to wait.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.worked_s = self.lost_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Compute from now on: what was before, such as waiting, takes what it took."""
        self._go_on(time.perf_counter(), 0.0)

    def _go_on(self, began_s: float, ahead_s: float) -> None:
        self._began_s, self._ahead_s = began_s, ahead_s
        self._worked_s, self._queued_s = time.thread_time(), queued_s()

    def settle(self) -> None:
        """Sleep until the device has done what was computed."""
        worked_s = time.thread_time() - self._worked_s
        self.worked_s += worked_s
        done_s = self._began_s + self.factor * worked_s
        now_s = time.perf_counter()
        if done_s > now_s:
            time.sleep(done_s - now_s)
            self._go_on(done_s, 0.0)  # a sleep is a little longer than asked for
        else:
            others_s = self._ahead_s + queued_s() - self._queued_s
            ahead_s = min(now_s - done_s, others_s)
            self._go_on(now_s - ahead_s, ahead_s)

    def wait(self, function: Callable[[], Any]) -> Any:
        """What a function returns that waits for a message when the device would."""
        self.settle()
        asked_s = time.perf_counter()
        found = function()
        if time.perf_counter() - asked_s > THERE_S:
            self.lost_s += self._ahead_s
            self.begin()
        return found


def queued_s() -> float:
    """How long this thread could have run, while others did; 0 where the kernel does not say."""
    if not SCHEDSTAT.exists():
        return 0.0
    return int(SCHEDSTAT.read_text().split()[1]) * 1e-9


def slowed_rows(rows: Sequence[TimedRow], throttle: Throttle) -> list[TimedRow]:
    """The rows with steps that take `factor` times their processor time from begin to end."""

    def slow(run: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> Any:
            throttle.begin()
            found = run()
            throttle.settle()
            return found

        return step

    return [replace(row, run=slow(row.run)) for row in rows]


def slowed_device(device: DeviceType, factor: float, name: str = "") -> DeviceType:
    """A device as fast as a process that is held so. name: its own unless given."""
    return replace(
        device,
        name=name or device.name,
        flops={dtype: rate / factor for dtype, rate in device.flops.items()},
        memory_bandwidth_bytes_s=device.memory_bandwidth_bytes_s / factor,
        overhead_s=device.overhead_s * factor,
        issue_s=device.issue_s * factor,
        op_times={
            op: tuple((work, seconds * factor) for work, seconds in points)
            for op, points in device.op_times.items()
        },
        measured={op: seconds * factor for op, seconds in device.measured.items()},
    )


def slowed_cluster(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with devices as fast as the processes are, which start messages more slowly too.

    Its links are as they were.
    """
    return replace(
        cluster,
        devices={name: slowed_device(one, factor) for name, one in cluster.devices.items()},
        start_overhead_s=cluster.start_overhead_s * factor,
        start_bandwidth_bytes_s=cluster.start_bandwidth_bytes_s / factor,
        message_overhead_s=cluster.message_overhead_s * factor,
        message_bandwidth_bytes_s=cluster.message_bandwidth_bytes_s / factor,
    )


def factor_for(ranks: int) -> float:
    """How many times its processor time each process takes, if nobody says: with more processes
    than cores, so many that a fifth of each core is left."""
    to_a_core = -(-ranks // (os.cpu_count() or 1))
    return 1.25 * to_a_core if to_a_core > 1 else 1.0


COLLECTIVES = (
    (dist, "all_reduce"),
    (dist, "all_to_all_single"),
    (in_flight, "gather_single"),
    (in_flight, "scatter_single"),
)
"""Where the functions are found that start collectives of a step."""


@dataclass(frozen=True)
class Held:
    """A collective's handle, waited for when the throttle's device would."""

    work: Any
    throttle: Throttle

    def wait(self) -> None:
        self.throttle.wait(self.work.wait)


Function = Callable[..., Any]


def _settled(throttle: Throttle, function: Function) -> Function:
    """The function, called when the device would be that far."""

    def call(*arguments: Any, **options: Any) -> Any:
        throttle.settle()
        return function(*arguments, **options)

    return call


def _waited(throttle: Throttle, function: Function) -> Function:
    """A function that waits for a message, which does so when the device would."""

    def call(*arguments: Any, **options: Any) -> Any:
        return throttle.wait(partial(function, *arguments, **options))

    return call


def _held(throttle: Throttle, function: Function) -> Function:
    """A collective that leaves, and is waited for, when the device would be that far."""
    start, whole = _settled(throttle, function), _waited(throttle, function)

    def call(*arguments: Any, **options: Any) -> Any:
        if not options.get("async_op"):
            return whole(*arguments, **options)
        work = start(*arguments, **options)
        return work and Held(work, throttle)

    return call


def _settled_once(throttle: Throttle, run_of_step: Function) -> Function:
    """A step's run, which begins when the device would be that far if it is there once."""

    def call(step: RankStep, run: Run, slots: Slots, last: frozenset[Place]) -> None:
        if run.micro_batch is None:
            throttle.settle()
        run_of_step(step, run, slots, last)

    return call


@contextmanager
def throttled(throttle: Throttle) -> Iterator[None]:
    """Meanwhile messages leave and are waited for when the throttle's device would be that far:
    those of stages, ours and those of PyTorch's schedules, and collectives.

    With a factor of 1 they are left alone: the device is the process, and never behind it.
    """
    if throttle.factor == 1:
        yield
        return
    held = (
        (RankStep, "run", _settled_once),
        (Mail, "send", _settled),
        (Mail, "receive", _waited),
        (pytorch, "_batch_p2p", _settled),
        (pytorch, "_wait_batch_p2p", _waited),
        *((home, name, _held) for home, name in COLLECTIVES),
    )
    before = [(home, name, getattr(home, name)) for home, name, _ in held]
    for (home, name, function), (*_, hold) in zip(before, held, strict=True):
        setattr(home, name, hold(throttle, function))
    try:
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)
