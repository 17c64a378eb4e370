"""Making times of CPU processes repeatable: on one core each, awake, and quick to answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]): pass
"""
"""Also ends when the process that started it does, however that ends."""

NETWORK_NICE = -5
"""Three times the share of a core that the main thread has."""


def pin(rank: int) -> None:
    """Keep this process, and threads that it starts later, on one of the cores that it may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def awake() -> Iterator[None]:
    """Context that keeps this core awake by an idle process: cores that slept are slower."""
    if not hasattr(os, "SCHED_IDLE"):
        yield
        return
    spinner = subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def hasten_network_threads() -> None:
    """Let this process's other threads, gloo's, run soon when a message comes, if allowed.

    Not by a real-time policy, nor by much: gloo's thread asks again and again for a connection's
    lock. If it came while the main thread, which has that, was sending on the same core, the main
    thread must get its share of the core to give it back: at -20 steps that send much stood still
    for 0.1 to 0.7 s, at -5 for at most 0.01 s.
    """
    if not os.path.isdir("/proc/self/task"):
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread == os.getpid():
            continue
        try:
            os.setpriority(os.PRIO_PROCESS, thread, NETWORK_NICE)
        except (PermissionError, ProcessLookupError):
            return
