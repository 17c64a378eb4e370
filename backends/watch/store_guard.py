"""A guard that detects when the store of torch.distributed does not answer.

One process keeps the store, torchrun or rank 0. If that is stopped, or its machine is gone, a
request to it never returns; so another thread has to notice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType


class StoreGuard:
    """Context for requests to torch's store, in which a thread reports an unanswered request.

    ended: set when the guard is to stop. beat_s: returns the seconds between checks. silent: called
    at each check while the same request is open, with the seconds that it has been open. Seconds
    are counted in checks, so that time in which this process itself was suspended does not count.
    """

    def __init__(
        self, ended: threading.Event, beat_s: Callable[[], float], silent: Callable[[float], None]
    ) -> None:
        self._ended, self._beat_s, self._silent = ended, beat_s, silent
        self._num_asked = 0
        self._is_asking = False
        threading.Thread(target=self._run, name="shardweave-store-guard", daemon=True).start()

    def __enter__(self) -> None:
        self._num_asked += 1
        self._is_asking = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_asking = False

    def _run(self) -> None:
        last, num_looks = 0, 0
        while not self._ended.wait(self._beat_s()):
            num_looks = num_looks + 1 if self._is_asking and self._num_asked == last else 0
            last = self._num_asked
            if num_looks:
                self._silent(num_looks * self._beat_s())


def keeper() -> str:
    """Describe the process that keeps the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun, which keeps torch.distributed's store,"
    return "rank 0, which keeps torch.distributed's store,"
