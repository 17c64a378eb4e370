"""Calls after one that ended in its midst, by an error or an interrupt, on a rank among others."""

from __future__ import annotations

from types import TracebackType

from shardweave.backends.watch import first_line


class Midst:
    """Stands around what ranks run together, and refuses it after an error in there.

    The others may wait in the message that the failed one would have sent next. What this rank
    sent then would be taken for it, and added up, in silence. is_joint: whether there are others.
    """

    def __init__(self, *, is_joint: bool) -> None:
        self._is_joint = is_joint
        self._error = ""

    def __enter__(self) -> None:
        if self._error:
            raise RuntimeError(
                f"an earlier call of the step ended in its midst on this rank ({self._error}), and "
                "other ranks may wait for the rest of it: what follows would be added to that. "
                "Look at batches before the call (ids in range, no empty ones); end the processes, "
                "and go on from the last checkpoint."
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._is_joint:
            self._error = first_line(error)
