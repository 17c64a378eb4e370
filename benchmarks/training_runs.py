"""Runs of examples/train.py and its eager twin: started, watched line by line, and killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import shardweave as sw

EXAMPLES = Path(__file__).parents[1] / "examples"
_WITH_OUR_NUMBERS = """
import runpy, sys
import shardweave as sw
del sys.argv[0]
from torch import nn
numbers, forward = sw.seeded(0), nn.Dropout.forward
def dropped(self, x):
    with numbers:
        return forward(self, x)
nn.Dropout.forward = dropped
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_STEP = re.compile(r"^step (\d+)/\d+  loss ([\d.]+)")
_START = re.compile(r"^starting after step (\d+)")
_VALIDATION = re.compile(r"^validation loss ([\d.]+)")


@dataclass
class TrainingRun:
    """A process that trains, and what it has said so far.

    starts: the step after which each start of it went on. said_losses: step and loss of each line;
    losses: the last one by step. validation: losses of the validations.
    """

    process: subprocess.Popen[str]
    log: IO[str]
    starts: list[int] = field(default_factory=list)
    said_losses: list[tuple[int, float]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    validation: list[float] = field(default_factory=list)

    def lines(self) -> Iterator[int]:
        """The step of each line on one, as it is said."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := _STEP.match(line):
                step, loss = int(found[1]), float(found[2])
                self.said_losses.append((step, loss))
                self.losses[step] = loss
                yield step
            elif found := _START.match(line):
                self.starts.append(int(found[1]))
            elif found := _VALIDATION.match(line):
                self.validation.append(float(found[1]))

    def until(self, step: int) -> None:
        """Wait until a step was said to be done. Raises RuntimeError if the run ends before."""
        for number in self.lines():
            if number == step:
                return
        raise RuntimeError(f"the run ended before step {step}:\n{self.said()}")

    def finish(self) -> None:
        """Wait for the end. Raises RuntimeError if it is not a good one."""
        with self.log, self.process:
            for _ in self.lines():
                pass
            if code := self.process.wait():
                raise RuntimeError(f"the run ended with code {code}:\n{self.said()}")

    def said(self) -> str:
        """The last lines of the run's errors."""
        self.log.seek(0)
        return "".join(self.log.readlines()[-80:])

    def kill(self) -> None:
        """Kill the launcher and its workers, without warning."""
        with self.log, self.process:
            for pid in [self.process.pid, *self.workers()]:
                _kill(pid)

    def kill_worker(self, index: int) -> None:
        """Kill one worker, without warning; the launcher notices."""
        workers = self.workers()
        _kill(workers[index % len(workers)])

    def workers(self) -> list[int]:
        """The processes that train, by id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [pid for pid in map(int, children.split()) if b"train.py" in _command(pid)]


def start(script: str, options: Sequence[str], *, launcher: Sequence[str] = ()) -> TrainingRun:
    """Start a script of the examples, by torchrun if options of it are given, one thread each.

    By itself, it draws the random numbers that steps draw: eager then drops the same elements.
    """
    command = [sys.executable]
    if launcher:
        command += ["-m", "torch.distributed.run", *launcher, str(EXAMPLES / script)]
    else:
        command += ["-c", _WITH_OUR_NUMBERS, str(EXAMPLES / script)]
    log = tempfile.TemporaryFile("w+")
    path = os.pathsep.join([str(Path(sw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    return TrainingRun(process, log)


def sharded(options: Sequence[str], mesh: str, *, max_restarts: int = 0) -> TrainingRun:
    """examples/train.py on a mesh, started by torchrun with a process per device."""
    launcher = ["--standalone", f"--nproc-per-node={sw.Mesh.parse(mesh).num_devices}"]
    launcher.append(f"--max-restarts={max_restarts}")
    return start("train.py", [*options, "--mesh", mesh], launcher=launcher)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
