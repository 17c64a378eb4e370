"""The `kernels` command: the kernels of a program, compiled ahead of time for named targets."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardweave.driver.commands.arguments import Commands, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(commands, kernels_command)
    command.add_program()
    command.add_argument(
        "-o", "--output", metavar="DIR", required=True, help="the folder to write to"
    )
    command.add_argument(
        "--target",
        default="sm_80,sm_90,gfx942",
        help="chips to compile for; '' writes sources alone (default: sm_80,sm_90,gfx942)",
    )


def kernels_command(options: argparse.Namespace) -> int:
    """Write and compile the kernels of a program."""
    from shardweave.driver.commands.read_programs import read
    from shardweave.driver.kernel_files import parse_targets, write_kernels

    targets = parse_targets(options.target)
    return 0 if write_kernels(read(options.file), targets, Path(options.output)) else 1
