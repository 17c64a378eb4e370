"""An error as people see it: one line for bad input, a traceback for a defect."""

from __future__ import annotations

import sys
import traceback

from shardweave.driver.processes import launch

PLAIN = (ValueError, OSError)
"""What bad input causes and one line explains; all else is a defect and shows its traceback."""


def report_error(error: Exception, debug: bool) -> int:
    """Say what went wrong: one line for bad input, everything else with its traceback."""
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


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"'{error.filename}': {error.strerror}; give the path of another file."
    if isinstance(error, UnicodeDecodeError):
        return f"what was read is not text (at byte {error.start}); give a text, as the help says."
    return " ".join(str(error).split()) or type(error).__name__
