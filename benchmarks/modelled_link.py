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

from shardweave.backends.distributed import in_flight

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
    """Make all-reduces, gathers and exchanges of this process behave as on a link of this rate."""
    speed = bytes_per_second(rate)
    free = [0.0]
    # A spinning thread must not keep the interpreter from the threads that bring messages.
    sys.setswitchinterval(5e-5)

    def slowed(original: Callable[..., Any], sends: Callable[..., float]) -> Callable[..., Any]:
        """sends: the elements that one rank sends, of the collective's tensors."""

        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            work = original(*args, async_op=True, **kwargs)
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            sent = sends(*tensors) * tensors[0].element_size()
            free[0] = max(free[0], time.perf_counter()) + sent / speed
            slow = _SlowWork(work, free[0])
            if async_op:
                return slow
            slow.wait()
            return None

        return collective

    others = dist.get_world_size() - 1
    share = others / (others + 1)
    dist.all_reduce = slowed(dist.all_reduce, lambda x: 2 * share * x.numel())
    in_flight.gather_single = slowed(in_flight.gather_single, lambda _, x: others * x.numel())
    # A scatter of sums sends what is other ranks', and leaves its own part out of the message.
    dist.all_to_all_single = slowed(dist.all_to_all_single, lambda _, x: x.numel())
