"""Real trials of plans, for planners that need them: each trial is a `shardweave run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.driver.processes.launch import stop_processes, terminated_as_exit
from shardweave.planners.plan.plan import Plan
from shardweave.planners.trials.trials import Host, Limits, Outcome

STOP_GRACE_S = 5.0
TAIL_LINES = 3
NO_MEMORY = ("out of memory", "can't allocate memory", "killed by SIGKILL", "Cannot allocate")
"""Messages of a run that had too little memory; the system kills such a process."""


@dataclass(frozen=True)
class LocalTrials:
    """Trains a model, given as for `shardweave run MODEL`, on processes of this machine.

    command: the command line that starts Python; tests replace it.
    """

    model: str
    dtype: str = "float32"
    command: Sequence[str] = (sys.executable, "-m", "shardweave")

    def __call__(self, plan: Plan, limits: Limits) -> Outcome:
        """Train by a plan within limits; failures are returned as outcomes, not raised. The
        processes form a group of their own, which is ended at the time limit, or when this process
        is terminated. If this process is killed, they end soon after the time limit."""
        with tempfile.TemporaryDirectory(prefix="shardweave-trial-") as folder:
            report, log = Path(folder, "report.json"), Path(folder, "log")
            plan.save(Path(folder, "plan.json"))
            command = [
                *self.command, "run", self.model, "--plan", str(Path(folder, "plan.json")),
                "--dtype", self.dtype, "--only-loss", "--no-eager",
                "--steps", str(max(2, limits.steps)), "--json", str(report),
                "--time-limit", str(limits.time_limit_s + STOP_GRACE_S),
                "--stop-above", str(limits.stop_above_s),
            ]  # fmt: skip
            with terminated_as_exit():
                code = _run(command, log, limits.time_limit_s)
            said = log.read_text(errors="replace")
            if code is None:
                return Outcome("timed_out", message=f"stopped after {limits.time_limit_s:g} s")
            if code != 0:
                return _failure(said, code)
            made = json.loads(report.read_text())
            times = tuple(float(t) for t in made["step_times_s"])
            ended = len(made["losses"]) < max(2, limits.steps)
            message = f"ended early: slower than {limits.stop_above_s:g} s" if ended else ""
            return Outcome("ok", times, float(made["peak_bytes"]), message)


def host_of(
    model: str | None, *, dtype: str = "float32", tell: Callable[[str], None] | None = None
) -> Host:
    """Make a planner's services: trial runs of a model on this machine, and `tell`, which gets a
    line after every trial. model: a spec as for `shardweave run`; None: no trial runs."""
    return Host(LocalTrials(model, dtype) if model else None, tell)


def _run(command: Sequence[str], log: Path, time_limit_s: float) -> int | None:
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop_group(process)


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """End the rest of a process' group: its leader, which stops its ranks, then all."""
    stop_processes([process], STOP_GRACE_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # none is left
        return


def _failure(said: str, code: int) -> Outcome:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    message = " ".join(errors[-1:] or lines[-TAIL_LINES:]) or f"exit code {code}"
    is_memory = any(sign in said for sign in NO_MEMORY)
    return Outcome("out_of_memory" if is_memory else "crashed", message=message)
