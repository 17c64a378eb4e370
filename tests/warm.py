"""Python programs as forks of a process that has imported torch: what stands in for `Popen`.

The environment, the arguments, the output and the exit code are those of a process of its own;
only what takes seconds, the imports, has been done before.
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

from shardweave.tests.shared_traces import share_traces
from shardweave.tests.spawn import warm_context


class WarmProcess:
    """As `subprocess.Popen` of `python FILE ..` or `python -m MODULE ..`, as far as it is used."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: io.BufferedIOBase | None,
        stderr: int | None,
    ) -> None:
        assert command[0] == sys.executable
        assert stdin == subprocess.DEVNULL
        assert (stdout is None) == (stderr is None)
        outputs = [DupFd(fd) for fd in ([1, 2] if stdout is None else [stdout.fileno()] * 2)]
        self._process = warm_context().Process(
            target=_run, args=(list(command[1:]), dict(env), outputs)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Negative for a signal, as in `Popen`."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: list[str], env: dict[str, str], outputs: list[Any]) -> None:
    """Run a file or a module as `python` does, with nothing of the server's but its imports."""
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.detach(), fd)
    os.environ.clear()
    os.environ.update(env)
    share_traces()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
