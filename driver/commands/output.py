"""Files that commands write."""

from __future__ import annotations

from pathlib import Path


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
