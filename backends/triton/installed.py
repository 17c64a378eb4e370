"""Check for Triton, which exists for Linux only."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """True if Triton is installed. Without it, regions run op by op."""
    try:
        return find_spec("triton") is not None
    except (ImportError, ValueError):  # hidden, or half removed
        return False
