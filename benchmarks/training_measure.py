"""What a step takes beside time: memory and messages by torch's profiler, bytes by the kernel."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import stat
import statistics
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timed_rows import TimedRow
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

_ACKED_BYTES = 120
"""Where `tcp_info` of linux/tcp.h has tcpi_bytes_acked, 8 bytes."""


STEPS = 5
"""That are looked at."""


@dataclass(frozen=True)
class Usage:
    """Of a step on one rank. peak_bytes: of tensors' memory, above what was there before; the least
    of the steps, since a thread of gloo's that is given no core lets go of a message late.
    messages: collectives and sends of gloo; it and sent_bytes are medians."""

    peak_bytes: int
    messages: int
    sent_bytes: int


def usage_of(row: TimedRow) -> Usage:
    """Take some steps of a row, and look at them. Collective."""
    with memory_of_all_threads():
        row.run()  # makes anew, and so known, what a step leaves for the next one
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
    messages = sum(_is_message(event.name()) for event in _results_of(seen).events())
    return Usage(peak_bytes(seen), messages, sent)


def _is_message(name: str) -> bool:
    return name.startswith("gloo:") and name != "gloo:recv"


@contextmanager
def memory_of_all_threads() -> Iterator[None]:
    """Meanwhile torch counts the memory of tensors on all threads.

    Otherwise its profiler counts that of the threads that it profiles, so that what another one,
    gloo's, is the last to let go of never seems to be freed. What was made before is not known,
    and not seen to be freed either.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def peak_bytes(seen: profile) -> int:
    """The most of tensors' memory at once, of all threads, above what was there before.

    seen: under `memory_of_all_threads`, with profile_memory. 0 if no memory was asked for.
    """
    found = [
        (event.start_time_ns, event.extra_fields)
        for event in _with_children(_results_of(seen).experimental_event_tree())
        if isinstance(event.extra_fields, _ExtraFields_Allocation)
    ]
    if not found:
        return 0
    found.sort(key=lambda one: one[0])
    first = found[0][1]
    return max(one.total_allocated for _, one in found) - first.total_allocated + first.alloc_size


def _results_of(seen: profile) -> Any:
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    return seen.profiler.kineto_results


def _with_children(events: Iterable[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children


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
