"""What a step takes beside time: memory and messages by torch's profiler, bytes by the kernel."""

from __future__ import annotations

import gc
import os
import socket
import stat
import statistics
import struct
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from timed_rows import TimedRow
from torch.profiler import ProfilerActivity, profile

_ACKED_BYTES = 120
"""Where `tcp_info` of linux/tcp.h has tcpi_bytes_acked, 8 bytes."""


STEPS = 5
"""That are looked at."""


@dataclass(frozen=True)
class Usage:
    """Of a step on one rank. peak_bytes: of tensors' memory, above what was there before; the least
    of the steps, since what gloo's own thread frees is not seen to be freed, so that a peak may be
    too high, never too low. The others are medians."""

    peak_bytes: int
    messages: int
    sent_bytes: int


def usage_of(row: TimedRow) -> Usage:
    """Take some steps of a row, and look at them. Collective."""
    steps = [_usage_of_step(row) for _ in range(STEPS)]
    return Usage(
        min(step.peak_bytes for step in steps),
        statistics.median_low(step.messages for step in steps),
        statistics.median_low(step.sent_bytes for step in steps),
    )


def _usage_of_step(row: TimedRow) -> Usage:
    row.clear()
    gc.collect()
    dist.barrier()
    before = sent_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        row.run()
    sent = sent_bytes() - before
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    live = peak = messages = 0
    events: list[Any] = seen.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        messages += event.name().startswith("gloo:")
    return Usage(peak, messages, sent)


def sent_bytes() -> int:
    """Bytes that this process has sent over the TCP connections that it has now."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                    total += struct.unpack_from("Q", info, _ACKED_BYTES)[0]
        except OSError:  # closed meanwhile, or no TCP
            continue
    return total
