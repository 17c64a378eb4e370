"""What the commands print: plain lines, and a spinner on standard error for long work."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console


def status(text: str) -> AbstractContextManager[Any]:
    """Show `text` with a spinner on standard error while the work lasts; nothing off a terminal."""
    return Console(stderr=True).status(f"{text} ...")


def bytes_text(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """0.0123 -> `12.3 ms`."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
