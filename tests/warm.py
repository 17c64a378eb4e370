"""Python programs as forks of a process that has imported torch: what stands in for `Popen`.

The environment, the arguments, the output and the exit code are those of a process of its own;
only what takes seconds, the imports, has been done before.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from shardweave.tests.shared_traces import share_traces
from shardweave.tests.spawn import warm_context


class WarmProcess:
    """As `subprocess.Popen` of `python FILE ..` or `python -m MODULE ..`, as far as it is used."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | IO[bytes],
        stdout: IO[bytes] | None,
        stderr: int | IO[bytes] | None,
        cwd: Path | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        del preexec_fn  # which ties a process to who started it: here to a server
        assert command[0] == sys.executable
        assert stdin == subprocess.DEVNULL or not isinstance(stdin, int)
        assert (stdout is None) == (stderr is None)
        given = [stdin, stdout, stdout if stderr == subprocess.STDOUT else stderr]
        fds = {
            fd: fd if file is None else file.fileno()
            for fd, file in enumerate(given)
            if not isinstance(file, int)
        }
        files = {fd: DupFd(source) for fd, source in fds.items()}
        self._process = warm_context().Process(
            target=_run, args=(list(command[1:]), dict(env), files, cwd)
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


def run_warm(
    command: Sequence[str],
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    input: str = "",
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, for text."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        stdin, stdout, stderr = files
        stdin.write(input.encode())
        stdin.seek(0)
        process = WarmProcess(command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        for output in (stdout, stderr):
            output.seek(0)
        said, errors = (output.read().decode() for output in (stdout, stderr))
        return subprocess.CompletedProcess(command, code, said, errors)


def _run(
    arguments: list[str], env: dict[str, str], files: dict[int, Any], cwd: Path | None
) -> None:
    """Run a file or a module as `python` does, with nothing of the server's but its imports."""
    for fd, file in files.items():
        os.dup2(file.detach(), fd)
    if 0 in files:
        sys.stdin = open(0, closefd=False)  # in place of nothing
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    share_traces()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
