"""This rank's part of the watchdog: a thread that reports its position, and reads the others'."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardweave.backends.watch.agreement import (
    AgreementError,
    ranks_text,
    sample_numbers,
    who_has_what,
)
from shardweave.backends.watch.alive import is_running, own_identity
from shardweave.backends.watch.position import (
    main_position,
    position_of,
    waits_since_marked,
)
from shardweave.backends.watch.store_guard import StoreGuard, keeper

SILENCE_S = 10.0
"""Seconds without a new record after which a process is taken to be dead or stopped, unless it is
seen to run on this machine: on an overloaded core, one was silent for 13 s."""

BEAT_S = 1.0

MEETING_S = 0.05
"""Longest pause between a rank's checks of whether others have come to a meeting."""

TRAIL_CALLS = 16
"""Interval, in calls, at which ranks compare hashes of all programs that they have run."""

CHECK = "SHARDWEAVE_CHECK"
"""Environment variable: 1 compares replicas on every call, which takes time; 0 never."""

GPU_CALLS = 256
"""Interval, in calls, at which inputs on GPUs are sampled too; the rank waits for the GPU then."""

NUM_TRAILS = 1024
"""Number of trails kept, the latest; other ranks compare a trail within a second."""

_PROGRAMS = "programs"
"""Key, in a trail, of the hash of all programs that have run."""

NUM_WATCHED = 8
"""Number of ranks that each rank watches; the store gets as many requests per rank and beat."""

EXIT_CODE = 1


class LostRankError(ConnectionError):
    """Raised if a rank died, stalled or failed; names it, and where this rank waited for it."""


_Trail = Mapping[str, int]


@dataclass(frozen=True)
class SignOfLife:
    """Status sent to other ranks. beat: its number. state: "running", "left", "cut off" by another
    rank's failure, or "failed: .."; entered: number of calls of steps begun; started: number of the
    last call whose program ran; call: describes the last call; at: position of the main thread;
    trail: number of a call, and hashes by key: of all programs run until then, and of the inputs
    for each shard (`sample_numbers`). identity: see `own_identity`."""

    beat: int
    state: str
    entered: int
    started: int
    call: str
    at: str
    process: str
    trail: tuple[int, _Trail] = (0, {})
    identity: str = ""

    @property
    def place(self) -> str:
        """Description of the rank's last position."""
        call = f" in call {self.entered} ({self.call})" if self.entered else ""
        return f"{self.at}{call}"


@dataclass
class _Seen:
    """The last record of another rank, and the local time when it changed."""

    record: SignOfLife
    since_s: float


@dataclass
class _Waiting:
    """A wait of the main thread. key: its position. is_marked: whether its frame is marked."""

    key: tuple[Any, ...]
    since_s: float
    is_marked: bool = False


class Watch:
    """This rank's watchdog. Making one is collective.

    timeout_s: longest wait in one collective. last_words: called with the reason when this rank
    ends. on_gpu: whether collectives run on GPUs, so that any wait for the device may be for them.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        last_words: Callable[[str], None],
        *,
        on_gpu: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self._last_words = last_words
        self.on_gpu = on_gpu
        self.set_timeout(timeout_s)
        self.entered = self.started = self._begun = 0
        self.call: Callable[[], Any] = str
        self.state = "running"
        self.problem = ""
        self._trail: dict[str, int] = {_PROGRAMS: 0}
        self._trails: dict[int, _Trail] = {0: {}}
        self._num_meetings = 0
        self._asks_at: str | None = None
        self._had_group = False
        self._store = dist.PrefixStore("shardweave", store.clone())  # pyright: ignore[reportPrivateImportUsage]
        self._beat = 0
        self._identity = own_identity()
        self._seen: dict[int, _Seen] = {}
        self._waiting: _Waiting | None = None
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._guard = StoreGuard(self._ended, lambda: self.beat_s, self._unanswered)
        with self.asking(main_position().text), self._guard:
            self._write()
        self._thread = threading.Thread(target=self._run, name="shardweave-watch", daemon=True)
        self._thread.start()

    def set_timeout(self, timeout_s: float) -> None:
        """Set the longest wait in one collective."""
        self.timeout_s = timeout_s
        self.silence_s = min(SILENCE_S, timeout_s)
        self.beat_s = min(BEAT_S, self.silence_s / 5)

    # Records

    def _write(self) -> None:
        self._beat += 1
        position = main_position()
        record = SignOfLife(
            self._beat,
            self.state,
            self.entered,
            self.started,
            str(self.call() or ""),
            position.text,
            f"process {os.getpid()} on {socket.gethostname()}",
            next(reversed(self._trails.items())),
            self._identity,
        )
        self._store.set(f"rank/{self.rank}", json.dumps(vars(record)))

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _look_at(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            text = self._read(f"rank/{rank}")
            if text is None:
                continue  # the rank has written no record yet
            record, seen = SignOfLife(**json.loads(text)), self._seen.get(rank)
            if seen is None or record.beat != seen.record.beat:
                self._seen[rank] = _Seen(record, time.monotonic())
                self._compare_trails(rank, *record.trail)

    def _compare_trails(self, rank: int, call: int, trail: _Trail) -> None:
        """Record a problem if ranks ran different programs; the next call of a step raises it."""
        own = self._trails.get(call, {})
        if not self.problem and any(
            own.get(key, number) != number for key, number in trail.items()
        ):
            self.problem = (
                f"rank {self.rank} and rank {rank} have run different programs in call {call} or "
                "before it, or had different batches: one had a batch of another shape, skipped a "
                "batch, or was in another mode. Set SHARDWEAVE_CHECK=1 to see which call it is"
            )

    def _cause(self, silence_s: float) -> tuple[int, str] | None:
        """Return a rank that failed or, silent for `silence_s`, seems gone, and why; else None."""
        with self._lock:
            everyone = sorted(self._seen.items())
        for rank, seen in everyone:
            if seen.record.state.startswith("failed"):
                return rank, f"rank {rank} {seen.record.state}"
        for rank, seen in everyone:
            silent_s = time.monotonic() - seen.since_s
            is_silent = seen.record.state == "running" and silent_s > silence_s
            if is_silent and not is_running(seen.record.identity):
                return rank, (
                    f"rank {rank} ({seen.record.process}) has given no sign of life for "
                    f"{silent_s:.0f} s: it was killed, or stopped, or its machine is gone. It was "
                    f"last at {seen.record.place}"
                )
        return None

    # The thread

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._ended.wait(self.beat_s):
            late_s = time.monotonic() - last_s - self.beat_s
            if late_s > self.beat_s:  # this process itself was suspended
                for seen in self._seen.values():
                    seen.since_s += late_s
            last_s = time.monotonic()
            self._had_group = self._had_group or dist.is_initialized()
            try:
                with self._guard:
                    with self._lock:
                        self._write()
                        self._look_at(self._watched())
                    self._judge()
            except RuntimeError as error:  # of the store
                if self._had_group and not dist.is_initialized():
                    return
                self._without_store(error)

    def _watched(self) -> list[int]:
        return [(self.rank + n) % self.size for n in range(1, min(self.size, NUM_WATCHED + 1))]

    def _judge(self) -> None:
        """End this process if it waits for a message that will not come."""
        waited_s = self._waited_s()
        if waited_s is None or self._asks_at is not None:
            return
        told = self._read("stop")
        cause = self._cause(self.silence_s)
        left = self._left()
        if cause is not None and self._is_stale(cause[0], waited_s):
            self._end(cause[1], waited_s)
        elif told is not None and waited_s > 3 * self.beat_s:
            self._end(told, waited_s)
        elif left and waited_s > self.silence_s:
            self._end(self._ended_program(left), waited_s)
        elif waited_s > self.timeout_s and main_position().is_waiting:
            self._end(self._who_is_late(), waited_s)

    def _left(self) -> list[int]:
        with self._lock:
            return [rank for rank, seen in self._seen.items() if seen.record.state == "left"]

    def _ended_program(self, ranks: Sequence[int]) -> str:
        """Describe `ranks`, which ended the program, and those that made fewer calls than this."""
        text = f"{ranks_text(ranks)} ended the program"
        counts = {rank: self._seen[rank].record.entered for rank in ranks}
        fewer = [rank for rank, count in counts.items() if count < self.entered]
        if not fewer:
            return text
        made = ", ".join(f"{counts[rank]} calls of steps" for rank in fewer)
        return f"{text} after {made}, and rank {self.rank} is in call {self.entered}"

    def _is_stale(self, rank: int, waited_s: float) -> bool:
        """True if a broken connection to `rank` had time to raise an error in the main thread."""
        is_failed = self._seen[rank].record.state.startswith("failed")
        return waited_s > (3 * self.beat_s if is_failed else self.beat_s)

    def _waited_s(self) -> float | None:
        """Return the seconds that the main thread has been in a collective; None if in none. On a
        GPU it may wait for the device on any line, so a long stay on any line counts."""
        position, now_s = main_position(), time.monotonic()
        if not position.is_waiting and not (self.on_gpu and self.entered and position.stack):
            self._waiting = None
            return None
        key = position.stack, self.entered, self.started
        was = self._waiting
        if was is None or was.key != key or (was.is_marked and not waits_since_marked(mark=False)):
            was = self._waiting = _Waiting(key, now_s)
        elif not was.is_marked and position.is_waiting and now_s - was.since_s > 3 * self.beat_s:
            waits_since_marked(mark=True)
            was.is_marked = True
        waited_s = now_s - was.since_s
        return waited_s if position.is_waiting or waited_s > self.silence_s else None

    def _who_is_late(self) -> str:
        """Describe the positions of the ranks that are behind or not waiting; of all if none is."""
        self._look_at(rank for rank in range(self.size) if rank != self.rank)
        own = self.entered, self.started
        late = {
            rank: seen.record.place
            for rank, seen in self._seen.items()
            if (seen.record.entered, seen.record.started) < own or "dist." not in seen.record.at
        }
        chosen = late or {rank: seen.record.place for rank, seen in self._seen.items()}
        places = "; ".join(f"rank {rank} is at {place}" for rank, place in sorted(chosen.items()))
        return (
            f"no answer within {self.timeout_s:g} s (timeout=.., or SHARDWEAVE_TIMEOUT): {places}"
        )

    def _without_store(self, error: RuntimeError) -> None:
        waited_s = self._waited_s()
        if waited_s is not None and waited_s > self.silence_s:
            self._end(f"{keeper()} does not answer: {first_line(error)}", waited_s)

    def _unanswered(self, silent_s: float) -> None:
        """End this rank if the store has been silent for too long. Runs on the guard's thread."""
        waited_s = self._waited_s() if self._asks_at is None else silent_s
        if silent_s > self.silence_s and waited_s is not None and waited_s > 3 * self.beat_s:
            gone = "it was stopped, or its machine is gone"
            cause = f"{keeper()} has not answered for {silent_s:.0f} s: {gone}"
            self._end(cause, waited_s, tell=False)

    def _end(self, cause: str, waited_s: float, tell: bool = True) -> None:
        """Print the cause and end this process, whose main thread would wait in C++ for ever. tell:
        whether to tell the other ranks through the store."""
        at = main_position().text if self._asks_at is None else self._asks_at
        text = f"{cause}. Rank {self.rank} waited for {waited_s:.0f} s at {at}"
        print(f"shardweave: rank {self.rank} stops: {text}.", file=sys.stderr, flush=True)
        self._last_words(f"{text}.")
        if tell:
            self._tell_end(cause)
        os._exit(EXIT_CODE)

    def _tell_end(self, cause: str) -> None:
        self.state = "cut off"
        try:
            self._store.set("stop", cause)
            self._write()
        except RuntimeError:
            return  # the store is gone: the others see it as well

    # The main thread

    @contextmanager
    def asking(self, at: str) -> Iterator[None]:
        """Context in which the main thread asks the store: only a silent store then ends this rank.
        at: describes its position."""
        self._asks_at = at
        try:
            yield
        finally:
            self._asks_at = None

    def begin(self, program: int) -> None:
        """Record that the entered call's program, or its backward part, begins to run. program: its
        number, equal on all ranks."""
        is_first = self._begun != self.entered
        self._begun = self.started = self.entered
        self._add_to_trail(_PROGRAMS, program)
        # Once per call: another rank may have read the trail before the backward part.
        if is_first and self.started % TRAIL_CALLS == 0:
            call = self.call()
            if call is not None and self.entered and os.environ.get(CHECK) != "0":
                of_gpus = self.started % GPU_CALLS == 0
                for place, number in sample_numbers(call.inputs, of_gpus=of_gpus).items():
                    self._add_to_trail(place, number)
            self._trails[self.started] = dict(self._trail)
            if len(self._trails) > NUM_TRAILS:
                del self._trails[next(iter(self._trails))]

    def _add_to_trail(self, key: str, number: int) -> None:
        self._trail[key] = hash((self._trail.get(key, 0), number))

    def explain(self, error: BaseException, frame: Any = None) -> LostRankError:
        """Make the error for a broken connection, naming the rank at fault. Takes some seconds."""
        position = position_of(frame).text if frame is not None else main_position().text
        self.state = "cut off"
        with self.asking(position):
            cause = self._found_cause()
        why = f"a connection broke ({first_line(error)})" if cause is None else cause
        if cause is None and self._left():
            why = self._ended_program(self._left())
        return self._lost(f"{why}. Rank {self.rank} waited for it at {position}.")

    def _found_cause(self) -> str | None:
        """Wait until `_cause` finds the reason, among all ranks, or another rank has reported it.
        Returns None if that takes too long."""
        until_s = time.monotonic() + self.silence_s + 3 * self.beat_s
        while time.monotonic() < until_s:
            try:
                with self._lock:
                    self._look_at(rank for rank in range(self.size) if rank != self.rank)
                told = self._read("stop")
            except RuntimeError as error:
                return f"{keeper()} does not answer ({first_line(error)}): it was killed, or ended"
            cause = self._cause(min(self.silence_s, 4 * self.beat_s))
            if cause is not None:
                return cause[1]
            if told is not None:
                return told
            time.sleep(self.beat_s / 4)
        return None

    def _lost(self, text: str) -> LostRankError:
        """Report the last words; returns the error for the main thread to raise."""
        self._last_words(text)
        return LostRankError(text)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank ends with an error."""
        if self.state == "running":
            self.state = f"failed: {type(error).__name__}: {first_line(error)}"
            with self.asking(main_position().text), self._lock:
                self._write()

    def meet(self, what: str, text: str, advice: str) -> None:
        """Raises AgreementError on every rank unless all ranks come here with the same text.
        Collective.

        what: names the operation; raises too if ranks come with different operations. Unlike
        torch's collectives, it does not hang if other ranks run a step instead.
        """
        self._num_meetings += 1
        key = f"meet/{self._num_meetings}"
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self.asking(main_position().text):
            self._store.set(f"{key}/{self.rank}", json.dumps([what, text]))
            entries = {rank: self._met(rank, f"{key}/{rank}", what, text) for rank in others}
        entries[self.rank] = what, text
        if len(set(entries.values())) > 1:
            raise AgreementError(f"{_difference(entries)}; {advice}.")

    def _met(self, rank: int, key: str, what: str, text: str) -> tuple[str, str]:
        """Wait for another rank to come to a meeting; returns its `what` and `text`."""
        begin_s, pause_s = time.monotonic(), 0.001
        while (answer := self._read(key)) is None:
            with self._lock:
                self._look_at([rank])
            seen = self._seen.get(rank)
            # Between two calls this rank may be ahead of one that still runs the last.
            if seen is not None and seen.record.started > self.started:
                told = f"rank {rank} runs call {seen.record.started} with {seen.record.call}"
                message = f"ranks differ in {what}: rank {self.rank} has {text}, {told}"
                self._store.set("stop", message)
                raise AgreementError(f"{message}; let every rank do the same.")
            cause = self._cause(self.silence_s)
            if cause is not None:
                raise self._lost(f"{cause[1]}. Rank {self.rank} waited to agree on {what}.")
            if rank in self._left() and self._read(key) is None:
                raise self._lost(
                    f"{self._ended_program([rank])}. Rank {self.rank} waited to agree on {what}."
                )
            if time.monotonic() - begin_s > self.timeout_s:
                raise self._lost(f"{self._who_is_late()}. Rank {self.rank} waited on {what}.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MEETING_S)
        what, text = json.loads(answer)
        return what, text

    def stop(self) -> None:
        """End the thread, and record that this rank has left."""
        if self._ended.is_set():
            return
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.silence_s)
            if self._thread.is_alive():
                return  # the store does not answer
        if self.state == "running":
            self.state = "left"
        try:
            self._write()
        except RuntimeError:
            return  # the store has gone already


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _difference(entries: Mapping[int, tuple[str, str]]) -> str:
    """Describe the difference between ranks that have met. entries: `what` and `text` by rank."""
    kinds = {what for what, _ in entries.values()}
    if len(kinds) == 1:
        lines = {rank: text for rank, (_, text) in entries.items()}
        return f"ranks differ in {kinds.pop()}: {who_has_what(lines)}"
    lines = {rank: f"{what}: {text}" for rank, (what, text) in entries.items()}
    return f"ranks differ in what they do: {who_has_what(lines)}"
