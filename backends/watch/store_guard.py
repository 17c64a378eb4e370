"""A guard of the store that torch.distributed was joined by.

The store is kept by one process, torchrun's or that of rank 0. If that is stopped, or its machine
is gone, a question to it never returns; so another thread has to notice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType


class StoreGuard:
    """Questions to the store are asked `with` it; it tells if one is not answered.

    ended: set when there is nothing to guard any more. beat_s: seconds from one look to the next.
    silent: called at each look as long as one question stands, with the seconds since it was asked.
    They are counted in looks: to a process that was asleep itself no answer is late.
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
    """The process that keeps the store, in words."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun, which keeps torch.distributed's store,"
    return "rank 0, which keeps torch.distributed's store,"
