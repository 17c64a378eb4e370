"""The command line: reads the arguments, runs a command, and says what is wrong.

A command is a file of `commands` with an `add_parser`. What it needs is imported when it runs, so
that `--help` is quick and `run` starts its processes before it imports torch.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from shardweave.__init__ import __version__
from shardweave.driver.errors import report_error
from shardweave.driver.launch import end_process
from shardweave.passes.notes import heard_by

COMMANDS = "capture opt plan run simulate profile diff prove report explore show kernels".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 for success, 1 for failure, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 2
    try:
        with heard_by(_print_note):
            return options.func(options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001  the last place that can tell the user
        return report_error(error, options.debug)


def console_main() -> NoReturn:
    """Run the command of this process's arguments, and end the process with its exit code.

    Torch's modules are most of what a command makes, and they stay: garbage is looked for rarely,
    and nothing is taken apart at the end.
    """
    gc.set_threshold(100_000)
    end_process(main())


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardweave", description="Compiles a PyTorch training step for a device mesh."
    )
    parser.add_argument("--version", action="version", version=f"shardweave {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"shardweave.driver.commands.{name}").add_parser(commands)
    return parser
