"""A process held to a share of a core, as if its device were slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from timed_rows import TimedRow
from torch.distributed.pipelining import schedules as pytorch

from shardweave.backends.mail import Mail
from shardweave.backends.pipeline import StagedStep
from shardweave.planners.cost.cluster import DeviceType


class Throttle:
    """Lets what this thread computes take `factor` times its processor time.

    It sleeps before each message leaves, before each is waited for, and at the end of each run of a
    function, for as long as the device would still compute. What other processes on the core take
    meanwhile counts as sleep, so that `factor` of them and more can share a core and keep their
    speeds.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.begin()

    def begin(self) -> None:
        """Compute from now on: what was before, such as waiting, takes what it took."""
        self._began_s, self._worked_s = time.perf_counter(), time.thread_time()

    def settle(self) -> None:
        """Sleep until the device has done what was computed."""
        worked_s = time.thread_time() - self._worked_s
        left_s = self.factor * worked_s - (time.perf_counter() - self._began_s)
        done_s = time.perf_counter() + left_s
        if left_s > 0:
            time.sleep(left_s)
        self.begin()
        if left_s > 0:  # a sleep is a little longer than asked for; the device went on
            self._began_s = done_s


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


@contextmanager
def throttled(throttle: Throttle) -> Iterator[None]:
    """Meanwhile messages of stages, ours and those of PyTorch's schedules, leave and are waited for
    when the throttle's device would be that far."""

    def settled(function: Callable[..., Any], *, waits: bool = False) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            throttle.settle()
            found = function(*arguments, **options)
            if waits:
                throttle.begin()
            return found

        return call

    def then_settled(function: Callable[..., Any]) -> Any:
        def call(*arguments: Any) -> None:
            function(*arguments)
            throttle.settle()

        return call

    run, send, receive = StagedStep.run, Mail.send, Mail.receive
    post, wait = pytorch._batch_p2p, pytorch._wait_batch_p2p
    StagedStep.run = then_settled(run)
    Mail.send, Mail.receive = settled(send), settled(receive, waits=True)
    pytorch._batch_p2p, pytorch._wait_batch_p2p = settled(post), settled(wait, waits=True)
    try:
        yield
    finally:
        StagedStep.run, Mail.send, Mail.receive = run, send, receive
        pytorch._batch_p2p, pytorch._wait_batch_p2p = post, wait
