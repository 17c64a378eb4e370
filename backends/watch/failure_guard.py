"""A guard that refuses further calls of a step after its program failed on this rank."""

from __future__ import annotations

import time
from itertools import count
from types import TracebackType
from typing import Any

import torch.distributed as dist

from shardweave.backends.watch import watchdog
from shardweave.backends.watch.position import computing_line
from shardweave.backends.watch.watch import MEETING_S, SILENCE_S, LostRankError, first_line
from shardweave.backends.watch.watchdog import is_broken
from shardweave.ir.torch_private import default_store

_numbers = count()
"""Numbers of steps, which all ranks make in the same order."""


class FailureGuard:
    """Context of the code that ranks run together. After an error in it, `check` refuses the next
    call, unless all ranks failed at the same line.

    Other ranks may be waiting for the next message of a failed rank. They would silently take a
    later message for that one, and use its values. If all ranks failed at the same line, they have
    sent the same messages. is_joint: whether there are other ranks.
    """

    def __init__(self, *, is_joint: bool) -> None:
        self._is_joint = is_joint
        self._number = next(_numbers) if is_joint else 0
        self._num_runs = 0
        self._error = ""
        self._line = ""

    def __enter__(self) -> None:
        self._num_runs += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or not self._is_joint:
            return
        self._error, self._line = first_line(error), computing_line(traceback)
        if not (isinstance(error, LostRankError) or is_broken(error)):  # with it the store may go
            self._tell(self._line)

    def check(self) -> None:
        """Raises RuntimeError if the last run failed, unless all ranks failed at the same line.

        Waits some seconds for other ranks to fail. It uses the store alone, and sends no message
        that a rank could mistake for another.
        """
        if not self._error:
            return
        if not self._is_on_all_ranks():
            raise RuntimeError(
                f"an earlier call of the step failed on this rank alone ({self._error}), so other "
                "ranks may still wait for its messages. End the processes and resume from the last "
                "checkpoint; check batches before the call (ids in range, no empty ones)."
            )
        self._error = self._line = ""

    def _is_on_all_ranks(self) -> bool:
        """True if all ranks have failed at this rank's line; False is final for all later calls."""
        until_s = time.monotonic() + SILENCE_S
        if not self._line:
            return False
        with watchdog.asking():
            ranks = range(dist.get_world_size())
            is_same = all(self._told(rank, until_s) == self._line for rank in ranks)
        if is_same:
            return True
        self._line = ""
        self._tell("")
        return False

    def _told(self, rank: int, until_s: float) -> str | None:
        """Wait for the line where a rank failed; None if it reports none before `until_s`."""
        store, key = self._store(), str(rank)
        while not store.check([key]):
            if time.monotonic() > until_s:
                return None
            time.sleep(MEETING_S)
        return store.get(key).decode()

    def _tell(self, line: str) -> None:
        """Report the line where this rank failed. An empty line matches no other rank's."""
        self._store().set(str(dist.get_rank()), line)

    def _store(self) -> Any:
        prefix = f"shardweave/failed/{self._number}/{self._num_runs}"
        return dist.PrefixStore(prefix, default_store())  # pyright: ignore[reportPrivateImportUsage]
