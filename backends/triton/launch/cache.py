"""Files that outlive a process: sources of kernels and tuned configurations.

Any number of processes may use one folder: a file appears whole or not at all, and one that does
not read is made again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "SHARDWEAVE_CACHE"


def cache_folder() -> Path:
    """The folder that SHARDWEAVE_CACHE names; by default below the user's own cache."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardweave"


def write_file(path: Path, text: str) -> None:
    """Write a file so that other processes see the old one, the new one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
