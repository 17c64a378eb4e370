"""A process held to a share of a core, as if its device were slower."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardweave.backends.mail import Mail
from shardweave.backends.pipeline import StagedStep


class Throttle:
    """Lets what this thread computes take `factor` times its processor time.

    It sleeps before each message leaves and at the end of each run of a function, for as long as
    the device would still compute. What other processes on the core take meanwhile counts as sleep,
    so that `factor` of them and more can share a core and keep their speeds.
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
        if left_s > 0:
            time.sleep(left_s)
        self.begin()


@contextmanager
def throttled(factor: float) -> Iterator[None]:
    """Meanwhile steps with stages of this process take `factor` times their processor time."""
    throttle = Throttle(factor)
    run, send, receive = StagedStep.run, Mail.send, Mail.receive

    def slow_run(self: Any, *arguments: Any) -> None:
        throttle.begin()
        run(self, *arguments)
        throttle.settle()

    def slow_send(self: Any, *arguments: Any) -> None:
        throttle.settle()
        send(self, *arguments)

    def slow_receive(self: Any, *arguments: Any) -> Any:
        throttle.settle()
        found = receive(self, *arguments)
        throttle.begin()
        return found

    slow: tuple[Any, Any, Any] = slow_run, slow_send, slow_receive
    StagedStep.run, Mail.send, Mail.receive = slow
    try:
        yield
    finally:
        StagedStep.run, Mail.send, Mail.receive = run, send, receive
