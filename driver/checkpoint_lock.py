"""A lock on a folder of checkpoints: one process at a time saves into it.

The lock is a file that names its holder. A holder that was killed leaves it behind: it is stale if
its process has ended, or, where this machine cannot see that process, if nobody has touched it for
a while. Taking over a stale lock gives a warning. Every save writes under a unique name, and
completes only if it still holds the lock: a holder that was merely suspended fails then, and no
files get mixed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from shardweave.backends.state.saved_state import CheckpointError
from shardweave.backends.watch.alive import is_gone, own_identity
from shardweave.passes.notes import warn

LOCK = ".writer"
TOUCHED_S = 10.0
STALE_S = 120.0
"""Seconds without a touch after which a lock is stale; file times may be a minute late."""


class FolderLock:
    """Exclusive right to save into a folder. token: name that is unique to this holder."""

    def __init__(self, root: Path) -> None:
        self.token = uuid.uuid4().hex[:12]
        self._path = root / LOCK
        self._own = root / f"{LOCK}-{self.token}"
        self._released = threading.Event()

    def acquire(self) -> None:
        """Raises CheckpointError, which names the holder, if another process holds the lock."""
        # A link is there with all its text at once: a process killed here leaves no empty lock.
        self._own.write_text(json.dumps(self._record()))
        try:
            while not self._linked():
                self._remove_stale()
            self._delete_left()
        finally:
            self._own.unlink(missing_ok=True)
        threading.Thread(target=self._touch, name="shardweave-checkpoint", daemon=True).start()

    def _linked(self) -> bool:
        """Try to create the lock file; True if this process now holds it, False if it exists."""
        try:
            os.link(self._own, self._path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with self._path.open("x") as file:
                    file.write(self._own.read_text())
            except FileExistsError:
                return False
        return True

    def check(self) -> None:
        """Raises CheckpointError if another process has taken the lock over."""
        holder = _holder(self._path)
        if holder.get("token") != self.token:
            raise CheckpointError(
                f"{_described(holder)} took over this save, which had not progressed for "
                f"{STALE_S:.0f} s; give each run a folder of its own."
            )

    def release(self) -> None:
        """Let others save. Does nothing without the lock."""
        self._released.set()
        if _holder(self._path).get("token") == self.token:
            self._path.unlink(missing_ok=True)

    def _record(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "identity": own_identity(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "token": self.token,
        }

    def _touch(self) -> None:
        while not self._released.wait(TOUCHED_S):
            try:
                os.utime(self._path)
            except OSError:  # the folder is gone, or the lock was taken over: `check` says so
                return

    def _remove_stale(self) -> None:
        holder = _holder(self._path)
        if not self._path.exists():  # it was released
            return
        ended = is_gone(str(holder.get("identity", "")))
        if not (self._is_old(self._path) if ended is None else ended):
            raise CheckpointError(
                f"{_described(holder)} is saving into this folder. Give each run a folder of its "
                "own, and end a run before another one resumes from its checkpoints; if that "
                f"process no longer exists, delete '{self._path}'."
            )
        why = "has ended" if ended else f"has not touched it for {STALE_S:.0f} s"
        warn(
            f"{_described(holder)} {why} and left the lock '{self._path}' of a save that it did "
            "not complete; this save takes it over.",
            UserWarning,
        )
        self._path.unlink(missing_ok=True)

    def _delete_left(self) -> None:
        """Delete temporary files of processes that were killed while they acquired the lock."""
        for path in self._path.parent.glob(f"{LOCK}-*"):
            ended = is_gone(str(_holder(path).get("identity", "")))
            if self._is_old(path) if ended is None else ended:
                path.unlink(missing_ok=True)

    def _is_old(self, path: Path) -> bool:
        """True if a lock was not touched for `STALE_S`, by the clock of its file system."""
        self._own.touch()
        try:
            return self._own.stat().st_mtime - path.stat().st_mtime > STALE_S
        except FileNotFoundError:  # it was released
            return False


def _holder(path: Path) -> dict[str, Any]:
    """Read a lock's record of its holder; empty if there is no lock, or if it was cut short."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('process')} on {holder.get('host')} (since {holder.get('time')})"
