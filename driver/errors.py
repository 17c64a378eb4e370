"""An error as people see it: one line for bad input, a traceback for a defect."""

from __future__ import annotations

import sys
import traceback

from shardweave.driver.processes import launch

PLAIN = (ValueError, OSError)
"""Errors that bad input causes and one line explains; all others are defects, with a traceback."""


def report_error(error: Exception, debug: bool) -> int:
    """Say what went wrong: one line for bad input, everything else with its traceback."""
    if _is_of_memory(error):
        words = "the memory of this machine is out; give a smaller model, batch or mesh."
        error = ValueError(words).with_traceback(error.__traceback__)
    is_plain = isinstance(error, PLAIN)
    if launch.is_launched():
        launch.report_failure(error, is_plain=is_plain)
        launch.end_process(1)
    if debug or not (is_plain or isinstance(error, launch.WorkerError)):
        traceback.print_exception(error)
    print(f"error: {_one_line(error)}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    if isinstance(error, launch.WorkerError) and error.tail:
        print("it said last:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in error.tail.splitlines()), file=sys.stderr)
    return 1


def _is_of_memory(error: Exception) -> bool:
    """True if memory is out, as Python says it, or torch for the CPU or a GPU."""
    is_torch = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_torch or "can't allocate memory" in str(error)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"'{error.filename}': {error.strerror}; give the path of another file."
    if isinstance(error, UnicodeDecodeError):
        return f"what was read is not text (at byte {error.start}); give a text, as the help says."
    return " ".join(str(error).split()) or type(error).__name__
