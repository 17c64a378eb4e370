"""Where commands write: files, and messages beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO


def check_output(path: str | None) -> None:
    """Raise ValueError if a file cannot be there, before the work whose result it is to hold.

    None and "-" (standard output) always pass.
    """
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise ValueError(f"'{path}' is a folder, expected a file to write; add a file's name.")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(f"cannot write '{path}': there is no folder '{folder}'; make it first.")


def messages(output: str) -> TextIO:
    """Where to say what was done: not where the program's text goes."""
    return sys.stderr if output == "-" else sys.stdout
