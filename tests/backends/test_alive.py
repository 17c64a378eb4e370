"""Processes that run, are stopped, or are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardweave.backends.watch.alive import is_running, own_identity

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")

CHILD = "import os\nprint(os.getpid(), flush=True)\nimport time\ntime.sleep(600)"


def identity_of(pid: int) -> str:
    """As the process itself would say it: all but the boot is in its own file."""
    boot = own_identity().split()[0]
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot} {pid} {start}"


def test_process_runs_until_it_is_stopped_and_again_when_it_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            identity = identity_of(child.pid)
            assert is_running(identity)
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert not is_running(identity)
            child.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, child.pid, os.WCONTINUED)
            assert is_running(identity)
        finally:
            child.kill()
    assert not is_running(identity)


def test_own_process_runs() -> None:
    assert is_running(own_identity())


def test_process_of_another_machine_or_of_the_same_number_is_another() -> None:
    boot, pid, start = own_identity().split()
    assert not is_running(f"other-{boot} {pid} {start}")
    assert not is_running(f"{boot} {pid} {int(start) + 1}")
    assert not is_running("")
