"""The `diff` command: its options and what it does."""

from __future__ import annotations

import argparse
import json
import sys

from shardweave.driver.commands.arguments import Commands, new_command

DIFFERENT = 1
"""Exit code under --exit-code for programs that differ, as git has it."""


def add_parser(commands: Commands) -> None:
    command = new_command(commands, diff_command)
    command.add_argument("before", metavar="A", help="a program's text; - reads standard input")
    command.add_argument("after", metavar="B", help="another program's text")
    command.add_cluster(required=False, why="simulate both on it: ")
    command.add_flag("--json", "print the diff as JSON instead")
    command.add_output("write both side by side, as one page", "--html")
    command.add_flag("--all", "show every change of a layer")
    command.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="default: auto, which is for terminals",
    )
    command.add_flag(
        "--exit-code", f"end with {DIFFERENT} if the programs differ, and 2 for bad input"
    )


def diff_command(options: argparse.Namespace) -> int:
    """Say what changed between two programs."""
    from rich.console import Console

    from shardweave.driver.commands.read_programs import note_what_is_simulated, read
    from shardweave.driver.diff import diff
    from shardweave.driver.report.diff_text import SHOWN, print_diff

    if options.before == options.after == "-":
        raise ValueError("both programs are '-', standard input; give the path of at least one.")
    before, after = read(options.before), read(options.after)
    delta = diff(before, after, cluster=options.cluster)
    if options.cluster:
        note_what_is_simulated(options.cluster, before, after)
    if options.json:
        print(json.dumps(delta.to_dict(), indent=2))
    else:
        colour = {"auto": None, "always": True, "never": False}[options.color]
        console = Console(force_terminal=colour, no_color=colour is False, highlight=False)
        print_diff(delta.structure, delta.numbers(), console, shown=None if options.all else SHOWN)
    if options.html:
        delta.save_html(options.html, (options.before, options.after))
        print(f"wrote {options.html}", file=sys.stderr if options.json else sys.stdout)
    return DIFFERENT if options.exit_code and not delta.is_empty else 0
