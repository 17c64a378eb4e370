"""Notes: remarks of a pass that are not errors, such as that it had nothing to do.

A pass calls `note` with a sentence that says why, and what to do. By default a note is a Python
warning (`PassNote`); the command line prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from shardweave.ir.notes import warn

Listener = Callable[[str], None]


class PassNote(UserWarning):
    """Warns that a pass had nothing to do; the message names the pass and says what to change."""


class PlanNote(UserWarning):
    """Warns that a plan leaves a tensor replicated, or a mesh axis idle; the message says why."""


def _warn(text: str) -> None:
    warn(text, PassNote)


_listener: ContextVar[Listener] = ContextVar("_listener", default=_warn)


def note(text: str) -> None:
    """Send a note to the current listener; without one, warn with PassNote."""
    _listener.get()(text)


def is_heard() -> bool:
    """True unless notes are dropped; if they are, a pass can skip the search for what to note."""
    return _listener.get() is not drop


def drop(text: str) -> None:
    """Ignore a note."""


@contextmanager
def heard_by(listener: Listener) -> Generator[None]:
    """Context manager: notes go to `listener` instead of becoming warnings."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def heard_from(passes: Collection[str], listener: Listener) -> Generator[None]:
    """Context manager: send notes that begin with the name of a pass in `passes` to `listener`,
    drop others. If `listener` is `note`, they go to the previous listener."""
    before = _listener.get()

    def hear(text: str) -> None:
        if text.partition(":")[0] in passes:
            with heard_by(before):
                listener(text)

    with heard_by(hear):
        yield


@contextmanager
def unheard() -> Generator[None]:
    """Context manager: drop all notes, for passes that the user did not ask for."""
    with heard_by(drop):
        yield
