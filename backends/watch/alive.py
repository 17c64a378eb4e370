"""Checks of whether a process on this machine is running, read from Linux's /proc.

A missing heartbeat may mean that a process was killed or stopped, or only that it waits for its
core, or for the interpreter's lock. Linux tells them apart, on the machine of the process.
"""

from __future__ import annotations

import os
from pathlib import Path

_ENDED = "ZX"
"""States of processes that have ended (proc(5))."""

_STOPPED = f"Tt{_ENDED}"
"""States of processes that have ended, or are stopped until a signal or debugger resumes them."""


def own_identity() -> str:
    """Return a unique identity of this process; empty if the system does not give one."""
    started = _state_and_start(os.getpid())
    return "" if started is None else f"{_boot()} {os.getpid()} {started[1]}"


def is_running(identity: str) -> bool:
    """True if the process with this `own_identity` runs on this machine, and is not stopped."""
    if not identity:
        return False
    boot, pid, start = identity.split()
    state = _state_and_start(int(pid)) if boot == _boot() else None
    return state is not None and state[1] == start and state[0] not in _STOPPED


def is_gone(identity: str) -> bool | None:
    """True if the process with this `own_identity` has ended; None if it is not on this machine."""
    boot, _, process = identity.partition(" ")
    if boot != _boot():
        return None
    pid, _, start = process.partition(" ")
    state = _state_and_start(int(pid)) if pid.isdecimal() else None
    return state is None or state[1] != start or state[0] in _ENDED


def _boot() -> str:
    """Return the identity of this boot of the machine, and of this PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """Return a process's state and start time; None if it does not exist, or /proc is missing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # after the name, which may have any character
    return fields[0], fields[19]
