"""A link that is slow by the clock, for machines where none can be shaped.

Each message is really sent, and counts as arrived no earlier than a first-in-first-out link of
the given rate would bring it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate: str) -> float:
    """The rate that tc would read: 250mbit is 31.25e6 bytes/s."""
    for unit, factor in _UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor / 8
    raise ValueError(f"rate '{rate}' is not like 250mbit; use kbit, mbit or gbit.")


class _SlowWork:
    def __init__(self, work: Any, due: float) -> None:
        self._work = work
        self._due = due

    def wait(self) -> None:
        while time.perf_counter() < self._due or not self._work.is_completed():
            pass
        self._work.wait()


def slow_down(rate: str) -> None:
    """Make torch.distributed.all_reduce of this process behave as on a link of this rate."""
    speed = bytes_per_second(rate)
    original: Callable[..., Any] = dist.all_reduce
    free = [0.0]
    # A spinning thread must not keep the interpreter from the threads that bring messages.
    sys.setswitchinterval(5e-5)

    def all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = original(tensor, *args, async_op=True, **kwargs)
        size = dist.get_world_size()
        sent = 2 * (size - 1) / size * tensor.numel() * tensor.element_size()
        free[0] = max(free[0], time.perf_counter()) + sent / speed
        slow = _SlowWork(work, free[0])
        if async_op:
            return slow
        slow.wait()
        return None

    dist.all_reduce = all_reduce
