"""Results of trials, and the file that stores them, so that a search can be resumed.

The file has JSON lines: first the problem, then one line for each trial. A line is written at once
and forced to disk; a line that was cut off when a process ended is ignored.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar, cast, get_args

from shardweave.planners.plan import plan_parts as parts
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError, Predicted
from shardweave.planners.trials.space import Configuration

FORMAT = "shardweave.trials/2"

Status = Literal["ok", "out_of_memory", "crashed", "timed_out"]


@dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    times_s: seconds of each step if it succeeded. peak_bytes: on the fullest device; None if
    unknown. message: what went wrong, or other information for the user.
    """

    status: Status
    times_s: tuple[float, ...] = ()
    peak_bytes: float | None = None
    message: str = ""

    def __post_init__(self) -> None:
        is_measured = bool(self.times_s) and all(0 < t < float("inf") for t in self.times_s)
        if (self.status == "ok") != is_measured:
            raise ValueError(
                f"a trial of status {self.status} has step times {self.times_s}; give positive "
                "times for status ok, and none otherwise."
            )

    @property
    def throughput(self) -> float:
        """Steps per second: the mean of 1 / t."""
        return statistics.fmean(1 / t for t in self.times_s)

    @property
    def variance(self) -> float:
        """Variance of the mean throughput: the steps' variance over their number; 0 for one
        step."""
        if len(self.times_s) < 2:
            return 0.0
        return statistics.variance(1 / t for t in self.times_s) / len(self.times_s)


Trial = Callable[[Configuration], Outcome]
"""Trains for a few steps. A failure in the training is returned as an Outcome, not raised."""


@dataclass(frozen=True)
class Record:
    """A completed trial. reason: why it was chosen. seconds: its duration."""

    configuration: Configuration
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


_KINDS: dict[type, parts.Reader] = {
    int: parts.at_least(0),
    float: parts.number,
    str: parts.text,
    bool: parts.one_of((True, False)),
}
_read_configuration = parts.record_of(
    Configuration, {f.name: _KINDS[type(f.default)] for f in fields(Configuration)}
)
_read_outcome = parts.record_of(
    Outcome,
    {
        "status": parts.one_of(get_args(Status)),
        "times_s": parts.list_of(parts.number, "seconds"),
        "peak_bytes": parts.optional(parts.number),
        "message": parts.text,
    },
)
_read_record = parts.record_of(
    Record,
    {
        "configuration": _read_configuration,
        "outcome": _read_outcome,
        "reason": parts.text,
        "seconds": parts.number,
    },
)


@dataclass(eq=False)
class TrialFile:
    """A file of trials, open for one search: `with TrialFile.open(path, problem) as file`.

    records: the trials in it. notes: what a user should know about the file as it was opened.
    """

    path: Path
    _descriptor: int
    records: list[Record] = field(default_factory=list[Record])
    notes: list[str] = field(default_factory=list[str])

    @staticmethod
    @contextmanager
    def open(path: str | Path, problem: Mapping[str, Any]) -> Generator[TrialFile]:
        """Create the file, or open an existing one to continue its search.

        problem: JSON data that describes the search; trials of another problem do not count for it.
        Raises PlanError for a file of another problem, for a file that holds no trials, and for one
        that another search has open.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise PlanError(
                f"the trials file '{path}' cannot be written: {error.strerror}; give another path."
            ) from error
        file = TrialFile(Path(path), descriptor)
        try:
            file._lock()
            file._read(json.loads(json.dumps(problem)))
            yield file
        finally:
            os.close(descriptor)

    def _lock(self) -> None:
        """Keep other searches out, where the system has such locks (not on Windows)."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PlanError(
                f"the trials file '{self.path}' is in use by another search; wait for its end, "
                "or give another file."
            ) from error

    def _read(self, problem: dict[str, Any]) -> None:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            # The next line must not be joined to what is left of this one.
            os.ftruncate(self._descriptor, len(whole))
            self.notes.append(
                f"the last line of '{self.path}' was cut off and is ignored: its trial runs "
                "again if it is chosen again"
            )
        lines = whole.decode(errors="replace").splitlines()
        if not lines:
            self._append({"format": FORMAT, "problem": problem})
            return
        self._check(self._json(lines[0], 1), problem)
        for number, line in enumerate(lines[1:], start=2):
            place = f"{self.path}:{number}"
            self.records.append(_read_record(self._json(line, number), place))

    def _json(self, line: str, number: int) -> Any:
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{self.path}:{number}: not JSON: {error.msg}; give a file that a search has "
                "written, or a new one."
            ) from error

    def _check(self, header: Any, problem: dict[str, Any]) -> None:
        content = cast("dict[str, Any]", header) if isinstance(header, dict) else {}
        if content.get("format") != FORMAT or not isinstance(content.get("problem"), dict):
            raise PlanError(
                f"{self.path}:1: the first line of a trials file must hold the format '{FORMAT}' "
                "and a problem; give a file that a search has written, or a new one."
            )
        own = cast("dict[str, Any]", content["problem"])
        for key in dict.fromkeys([*problem, *own]):
            if own.get(key) != problem.get(key):
                raise PlanError(
                    f"the trials file '{self.path}' is of another search: it has {key} "
                    f"{own.get(key)!r}, but this search has {problem.get(key)!r}; give another "
                    "file."
                )

    def add(self, record: Record) -> None:
        self._append(asdict(record))
        self.records.append(record)

    def _append(self, data: Mapping[str, Any]) -> None:
        line = (json.dumps(data) + "\n").encode()
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"wrote only {written} of {len(line)} bytes to '{self.path}'; free space")
        os.fsync(self._descriptor)


@dataclass(frozen=True)
class Limits:
    """Limits of a real trial: steps, seconds, and the step time above which it ends early."""

    steps: int
    time_limit_s: float
    stop_above_s: float = math.inf


Launch = Callable[[Plan, Limits], Outcome]
"""Trains by a plan on real processes, within limits."""


@dataclass(frozen=True)
class Host:
    """Services of the program that calls a planner.

    launch: runs a real trial; None if it cannot. tell: a callback for a line after every trial.
    """

    launch: Launch | None = None
    tell: Callable[[str], None] | None = None


T = TypeVar("T")
R = TypeVar("R")


class Deadline:
    """The end of a search after a number of seconds; 0: no end."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s if limit_s else math.inf

    @property
    def is_past(self) -> bool:
        return time.monotonic() >= self._end_s

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield `function(item)` for the first item, and for others until the deadline."""
        for number, item in enumerate(items):
            if number and self.is_past:
                return
            yield function(item)


def launch_of(host: Host | None, planner: str) -> Launch:
    """Return the host's function for real trials. Raises PlanError if it has none."""
    if host is None or host.launch is None:
        option = "-O trials=10" if planner == "amp" else "-O real=true"
        raise PlanError(
            "real trials train a model, but only a program is given; name a model, as in "
            f"`shardweave plan gpt:layers=2,hidden=64 --planner {planner} {option}`."
        )
    return host.launch


@dataclass(eq=False)
class RealTrials:
    """Trains by several plans, one after another, and records the fastest one's step time.

    steps, time_limit_s: limits of a trial. slow: a trial ends when
    `driver.training.training.ENOUGH_SLOW` steps took more than this many times a step of the
    fastest trial; 0: never. fastest_s: seconds of a step of the fastest trial.
    """

    launch: Launch
    steps: int
    time_limit_s: float
    slow: float
    fastest_s: float = math.inf

    def __post_init__(self) -> None:
        if self.slow and self.slow < 1:
            raise PlanError(
                f"slow is {self.slow:g}, but trials are ended when they are that many times "
                "slower than the fastest; give a number above 1, or 0 to end none."
            )

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        steps_s = [fmean(o.times_s) for o in outcomes if o.status == "ok"]
        self.fastest_s = min([self.fastest_s, *steps_s])

    def run(self, plan: Plan) -> Outcome:
        """Train by a plan."""
        most = self.slow * self.fastest_s if self.slow else math.inf
        outcome = self.launch(plan, Limits(self.steps, self.time_limit_s, most))
        self.learn([outcome])
        return outcome


def measured(outcome: Outcome) -> Predicted:
    """Make a prediction from a real trial; how its time divides into parts is unknown."""
    memory = {} if outcome.peak_bytes is None else {"peak": outcome.peak_bytes}
    return Predicted(fmean(outcome.times_s), memory_bytes=memory, source="measured")
