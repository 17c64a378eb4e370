"""One process per rank on this machine, all stopped as soon as one fails.

The processes get torchrun's environment variables, and share a folder with three kinds of files:
one through which they find each other (a port could be taken by another program), the output of
each rank except 0, and the error of each rank that failed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

FOLDER = "SHARDWEAVE_LAUNCH_FOLDER"
"""Environment variable with the path of the folder that the launched processes share."""

PROCESSES_PER_CORE = 8
LEAST_PROCESSES = 64
"""Number of processes allowed on any machine; each takes half a gigabyte."""

POLL_S = 0.05
STOP_GRACE_S = 3.0
TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SIGKILL = 9  # which Windows does not have


class WorkerError(RuntimeError):
    """Raised if a process died, or the time limit passed. `tail`: its last lines of output."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class Worker:
    """A started process. log: the file of its output; None: it writes to this process's output."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    report: Path


def launch(
    command: Sequence[str], num_processes: int, *, time_limit_s: float | None = None
) -> None:
    """Run `command` as ranks 0 .. num_processes - 1 and wait until all have ended.

    Rank 0 writes to this process's output. If a rank fails or `time_limit_s` seconds have passed,
    all ranks are stopped; on Linux they also stop if this process is killed. Raises ValueError with
    a rank's message if that rank reported a plain failure (see `report_failure`), and WorkerError
    for all other failures.
    """
    most = max(LEAST_PROCESSES, PROCESSES_PER_CORE * num_cores())
    if num_processes > most:
        raise ValueError(
            f"{num_processes:,} processes are more than the {most} that this machine can start; "
            "give a smaller mesh, start them on several machines with torchrun, or run all ranks "
            "in one process (--backend reference)."
        )
    sys.stdout.flush()  # our output comes before that of rank 0
    with tempfile.TemporaryDirectory(prefix="shardweave-") as folder, terminated_as_exit():
        workers: list[Worker] = []
        try:
            for rank in range(num_processes):
                workers.append(_start(command, rank, num_processes, Path(folder)))
            _wait(workers, time_limit_s)
        finally:
            stop_processes([worker.process for worker in workers], STOP_GRACE_S)


def is_worker() -> bool:
    """True if this process is one of several ranks that torchrun, or `launch`, started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """True if this process was started by `launch`."""
    return FOLDER in os.environ


def store_file() -> Path | None:
    """The file through which launched processes find each other; None if `launch` did not start
    this process."""
    return Path(os.environ[FOLDER], "store") if is_launched() else None


def report_failure(error: BaseException, *, is_plain: bool) -> None:
    """Tell the launcher why this rank is about to end. is_plain: whether the message alone tells a
    user what is wrong, as with bad input."""
    path = _report_path(Path(os.environ[FOLDER]), int(os.environ["RANK"]))
    record = {
        "time_s": time.time(),
        "is_plain": is_plain,
        "message": str(error) or type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }
    path.write_text(json.dumps(record))


def end_after(time_limit_s: float) -> None:
    """End this process, started by torchrun, after a time limit; torchrun then ends the others. A
    thread does it, since the process may be waiting in a collective."""

    def end() -> None:
        print(
            f"error: rank {os.environ['RANK']} was still running after the time limit of "
            f"{time_limit_s:g} s, and was stopped; give a longer time limit.",
            file=sys.stderr,
        )
        end_process(1)

    timer = threading.Timer(time_limit_s, end)
    timer.daemon = True
    timer.start()


def end_process(code: int) -> NoReturn:
    """End this process at once, without shutting down the interpreter: threads of gloo that still
    free tensors would abort the process if they found the interpreter shut down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _start(command: Sequence[str], rank: int, num_processes: int, folder: Path) -> Worker:
    log = None if rank == 0 else folder / f"rank{rank}.log"
    output: IO[bytes] | None = None if log is None else log.open("wb")
    try:
        process = subprocess.Popen(
            list(command),
            env=_environment(rank, num_processes, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            preexec_fn=_dying_with_us(),
        )
    finally:
        if output is not None:
            output.close()
    return Worker(rank, process, log, _report_path(folder, rank))


def _dying_with_us() -> Callable[[], None] | None:
    """Return a `preexec_fn` that has Linux kill the new process when the thread that started it
    ends; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    # PyDLL keeps the interpreter's lock, which another thread may have held at the fork.
    libc, launcher = ctypes.PyDLL(None), os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before
            os._exit(1)

    return tie


def _environment(rank: int, num_processes: int, folder: Path) -> dict[str, str]:
    threads = max(1, num_cores() // num_processes)
    defaults = {"OMP_NUM_THREADS": str(threads)}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        # All ranks are on this machine, whose host name may resolve to an address that does not
        # answer.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    ours = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        FOLDER: folder,
    }
    return defaults | dict(os.environ) | {name: str(value) for name, value in ours.items()}


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _wait(workers: Sequence[Worker], time_limit_s: float | None) -> None:
    start_s = time.monotonic()
    while True:
        codes = {worker.rank: worker.process.poll() for worker in workers}
        failed = [worker for worker in workers if codes[worker.rank]]
        if failed:
            # A rank that failed first may still be closing its connections.
            reported = [w for w in workers if w.report.exists() and codes[w.rank] is None]
            raise _failure([*failed, *reported], len(workers))
        running = [rank for rank, code in codes.items() if code is None]
        if not running:
            return
        if time_limit_s is not None and time.monotonic() - start_s > time_limit_s:
            last = workers[running[-1]]
            if len(workers) == 1:
                raise WorkerError(
                    f"the run did not end within the time limit of {time_limit_s:g} s, and was "
                    "stopped; give a longer time limit."
                )
            raise WorkerError(
                f"ranks {running} of {len(workers)} were still running after the time limit of "
                f"{time_limit_s:g} s, so that all ranks were stopped. Give a longer time limit, "
                f"or read the last output of rank {last.rank}.",
                _tail_of_log(last),
            )
        time.sleep(POLL_S)


def _failure(failed: Sequence[Worker], num_processes: int) -> Exception:
    """Return the error of the rank that failed first, which makes the other ranks fail."""
    reports = {worker.rank: _read_report(worker) for worker in failed}
    # A rank without a report was killed or crashed, so it counts as the first.
    first = min(failed, key=lambda worker: reports[worker.rank].get("time_s", 0.0))
    report = reports[first.rank]
    if report.get("is_plain"):
        return ValueError(report["message"])
    tail = _last_lines(report["traceback"]) if report else _tail_of_log(first)
    message = (
        f"rank {first.rank} of {num_processes} died ({_how(first.process.returncode)}); "
        f"all ranks were stopped.{_likely_cause(first.process.returncode)}"
    )
    return WorkerError(message, tail)


def _how(code: int | None) -> str:
    if code is None:
        return "with an error"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _likely_cause(code: int | None) -> str:
    """Explain the usual cause of a SIGKILL, for a message; "" for other exit codes."""
    if code != -_SIGKILL:
        return ""
    return (
        " Linux kills processes so when memory runs out: run fewer processes here, or a smaller "
        "model."
    )


def _read_report(worker: Worker) -> dict[str, Any]:
    if not worker.report.exists():
        return {}
    try:
        return json.loads(worker.report.read_text())
    except json.JSONDecodeError:  # the process was killed while it wrote
        return {}


def _tail_of_log(worker: Worker) -> str:
    if worker.log is None:
        return ""
    return _last_lines(worker.log.read_text(errors="replace"))


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


def stop_processes(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Terminate the processes that still run; kill those that have not ended after `grace_s`."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that our processes end with us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
