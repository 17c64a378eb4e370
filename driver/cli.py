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
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from shardweave.__init__ import __version__
from shardweave.driver.commands.arguments import check_writable, load_passes
from shardweave.driver.errors import report_error
from shardweave.driver.processes.launch import end_process
from shardweave.ir.plugins import load_plugins
from shardweave.passes.notes import heard_by

TASKS = {
    "train a model": ("run",),
    "choose how": ("plan", "simulate", "profile", "calibrate"),
    "look at it": ("explore", "report", "show", "diff"),
    "make and change the program": ("capture", "compile", "opt", "prove", "kernels"),
    "set up the shell": ("completion",),
}
"""The commands by what a person wants to do."""

FOLDERS = {
    "plans.": ("plan", "simulate", "report", "profile", "calibrate"),
    "programs.": ("explore", "show", "diff", "capture", "compile", "opt", "prove", "kernels"),
}
"""The folders of `commands` that hold the files of commands; others stand in `commands` itself."""


TROUBLE = 2
"""Exit code under `diff --exit-code` for bad input, which must not look like a difference."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 for success, 1 for failure, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = command_line()
        given = argparse.Namespace(arguments=arguments, parser=parser)
        options = parser.parse_args(arguments, given)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 2
    try:
        with heard_by(_print_note):
            load_plugins()
            load_passes(getattr(options, "load", ()))
            check_writable(options)
            code = options.func(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Who reads the output, such as `head`, has enough, and nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001  the last place that can tell the user
        code = report_error(error, options.debug)
        return TROUBLE if getattr(options, "exit_code", False) else code


def console_main() -> NoReturn:
    """Run the command in this process's arguments, with little garbage collection; then exit."""
    gc.set_threshold(100_000)
    end_process(main())


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
        dest="command", required=True, metavar="COMMAND", prog="shardweave", help=argparse.SUPPRESS
    )
    for name in (name for names in TASKS.values() for name in names):
        folder = next((folder for folder, names in FOLDERS.items() if name in names), "")
        import_module(f"shardweave.driver.commands.{folder}{name}").add_parser(commands)
    parser.epilog = _listed(commands.choices)
    return parser


def _listed(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    lines: list[str] = []
    for task, names in TASKS.items():
        lines.append(f"{task}:")
        lines += [f"  {name:10}  {parsers[name].description}" for name in names]
    return "\n".join([*lines, "", "'shardweave COMMAND --help' says what a command takes."])
