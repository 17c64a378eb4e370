"""Warnings that point to the line of the user's code that caused them, and log lines."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import warnings
from pathlib import Path

log = logging.getLogger("shardweave")

_OURS = (
    *(
        f"{Path(__file__).parents[1] / folder}{os.sep}"
        for folder in ("ir", "passes", "planners", "backends", "driver")
    ),
    contextlib.__file__,  # of our own context managers
)


class TorchNote(UserWarning):
    """Warns that torch is newer than tested, or lacks a name that saves time or memory."""


class CaptureNote(UserWarning):
    """Warns that a captured program differs from the model's code; the message says how."""


def warn(text: str, category: type[UserWarning]) -> None:
    """Warn, pointing to the innermost line that is neither the package's nor torch's."""
    torch = sys.modules.get("torch")  # which calls steps, and takes seconds to import
    files = _OURS if torch is None else (*_OURS, str(Path(str(torch.__file__)).parent))
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(files):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def say(text: str) -> None:
    """Log a text at level INFO to the logger "shardweave". If no handler is installed, print it on
    standard error, unless the logger's own level is set above INFO."""
    if log.hasHandlers():
        log.info(text)
    elif not log.level or log.isEnabledFor(logging.INFO):
        print(text, file=sys.stderr)
