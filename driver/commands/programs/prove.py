"""The `prove` command: that a program computes what another does, without running either."""

from __future__ import annotations

import argparse

from shardweave.driver.commands.arguments import Commands, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(commands, prove_command)
    command.add_argument(
        "file", metavar="FILE", help="a program, of one rank or global; - reads standard input"
    )
    command.add_argument(
        "--against",
        metavar="FILE",
        required=True,
        help="the program to be equal to: the captured one, or another of one rank",
    )


def prove_command(options: argparse.Namespace) -> int:
    """Prove that a program computes what another does, without running it."""
    from shardweave.driver.commands.read_programs import read
    from shardweave.ir.proof.prove import prove
    from shardweave.ir.verify.program import check

    program, goal = read(options.file), read(options.against)
    for given in (program, goal):
        check(given)
    print(prove(program, against=goal))
    return 0
