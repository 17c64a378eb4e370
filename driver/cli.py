"""The command line: reads the arguments, runs a command, and says what is wrong.

A command is a file of `commands` with an `add_parser`. What it needs is imported when it runs, so
that `--help` is quick and `run` starts its processes before it imports torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from shardweave.__init__ import __version__
from shardweave.driver.commands.arguments import Command, check_writable, load_passes
from shardweave.driver.processes import launch
from shardweave.ir.plugins import load_plugins
from shardweave.passes.notes import heard_by

_MODULES = {
    "train a model": ("run",),
    "choose how": ("plans.plan", "plans.simulate", "plans.profile", "plans.calibrate"),
    "look at it": ("programs.explore", "plans.report", "programs.show", "programs.diff"),
    "make and change the program": tuple(
        f"programs.{name}" for name in ("capture", "compile", "opt", "prove", "kernels")
    ),
    "set up the shell": ("completion",),
}
"""The modules of `commands`, each a command of its name, by what a person wants to do."""

TASKS = {
    task: tuple(module.rpartition(".")[2] for module in modules)
    for task, modules in _MODULES.items()
}
"""The commands by what a person wants to do."""

TROUBLE = 2
"""Exit code under `diff --exit-code` for bad input, which must not look like a difference."""

PLAIN = (ValueError, OSError)
"""Errors that bad input causes and one line explains; all others are defects, with a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 for success, 1 for failure, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = argparse.Namespace(debug=False)
    try:
        parser = command_line()
        given = argparse.Namespace(arguments=arguments, parser=parser)
        options = parser.parse_args(arguments, given)
        with heard_by(_print_note):
            load_plugins()
            load_passes(getattr(options, "load", ()))
            check_writable(options)
            code = options.func(options)
        sys.stdout.flush()
        return code
    except SystemExit as exit_:  # of argparse, or of a process that is told to end
        return exit_.code if isinstance(exit_.code, int) else 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it: that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001  the last place that can tell the user
        code = _report_error(error, options.debug)
        return TROUBLE if getattr(options, "exit_code", False) else code


def console_main() -> NoReturn:
    """Run the command in this process's arguments, with little garbage collection; then exit."""
    gc.set_threshold(100_000)
    launch.end_process(main())


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def command_line() -> argparse.ArgumentParser:
    """Make the parser of all commands; each command's `func` runs it."""
    parser = argparse.ArgumentParser(
        prog="shardweave",
        usage="shardweave [-h] [--version] COMMAND ...",
        description="Compiles a PyTorch training step for a device mesh.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardweave {__version__}")
    # The commands are listed below, by task.
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        prog="shardweave",
        help=argparse.SUPPRESS,
        parser_class=Command,
    )
    for module in (module for modules in _MODULES.values() for module in modules):
        import_module(f"shardweave.driver.commands.{module}").add_parser(commands)
    parser.epilog = _listed(commands.choices)
    return parser


def _listed(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    lines: list[str] = []
    for task, names in TASKS.items():
        lines.append(f"{task}:")
        lines += [f"  {name:10}  {parsers[name].description}" for name in names]
    return "\n".join([*lines, "", "'shardweave COMMAND --help' says what a command takes."])


# Errors as people see them


def _report_error(error: Exception, debug: bool) -> int:
    """Say what went wrong: one line for bad input, everything else with its traceback."""
    if _is_of_memory(error):
        words = "this machine is out of memory; give a smaller model, batch or mesh."
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
    """True for out-of-memory errors: of Python, and of torch on the CPU or a GPU."""
    is_torch = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_torch or "can't allocate memory" in str(error)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"'{error.filename}': {error.strerror}; give the path of another file."
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not text (at byte {error.start}); give a text file, see --help."
    return " ".join(str(error).split()) or type(error).__name__
