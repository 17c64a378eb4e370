"""The `prove` command: that a program computes what another does, without running either."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardweave.driver.commands.arguments import Commands, check_output, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(
        commands, "prove", "Prove that a program computes what another does, without running it."
    )
    command.add_argument(
        "file", metavar="FILE", help="a program, of one rank or global; - reads standard input"
    )
    command.add_argument(
        "--against",
        metavar="FILE",
        required=True,
        help="the program that it is to compute: the captured one, or another of one rank",
    )
    group = command.add_mutually_exclusive_group()
    group.add_argument(
        "--certificate", metavar="FILE", help="write what each value is, and why, as JSON"
    )
    group.add_argument(
        "--check", metavar="FILE", help="do not search for a proof; check this certificate of one"
    )
    command.set_defaults(func=prove_command)


def prove_command(options: argparse.Namespace) -> int:
    from shardweave.driver.commands.read_programs import read
    from shardweave.ir.proof.check import check_certificate
    from shardweave.ir.proof.prove import prove
    from shardweave.ir.verify.program import check

    check_output(options.certificate)
    program, goal = read(options.file), read(options.against)
    for given in (program, goal):
        check(given)
    if options.check is not None:
        print(check_certificate(Path(options.check).read_text(), program, against=goal))
        return 0
    proof = prove(program, against=goal)
    if options.certificate is not None:
        proof.save(options.certificate)
    print(proof)
    return 0
