"""A mark of the time in which torch traces Python code, for threads that look on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

_open: list[None] = []
"""An item for each open `tracing` context; appended and removed by single operations."""


@contextmanager
def tracing() -> Generator[None]:
    """Mark the time inside the context as a trace: other threads then read no frames.

    A frame object that another thread makes keeps local variables alive after their function has
    returned. In torch's tracers some are guards that set their thread's state back when they die:
    late, or in the other thread, where they corrupt the trace.
    """
    _open.append(None)
    try:
        yield
    finally:
        _open.pop()


def is_tracing() -> bool:
    """True if any thread is inside a `tracing` context."""
    return bool(_open)
