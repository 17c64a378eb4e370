"""The `explore` command: what passes do to a program, as a page for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardweave.driver.commands.arguments import (
    Commands,
    add_cluster,
    add_program,
    check_output,
    new_command,
)


def add_parser(commands: Commands) -> None:
    command = new_command(commands, "explore", "Show what each pass does, as an HTML page.")
    add_program(command)
    command.add_argument(
        "--passes", metavar="SPEC", default="", help="pass{option=value},pass,..., in this order"
    )
    add_cluster(command)
    command.add_argument("--mesh", help="as in data=2,tensor=2; default: the program's own")
    command.add_argument("-o", "--output", metavar="FILE", required=True, help="the page")
    command.add_argument(
        "--optimizer",
        type=float,
        default=0.0,
        metavar="X",
        help="bytes of optimizer state per byte of parameters, such as 2 for Adam (default: 0)",
    )
    command.set_defaults(func=explore_command)


def explore_command(options: argparse.Namespace) -> int:
    from shardweave.driver.commands.programs import program_line, read
    from shardweave.driver.explore import explore
    from shardweave.driver.report.text import status
    from shardweave.planners.cost.quantity import bytes_text

    check_output(options.output)
    program = read(options.file)
    with status("running passes, and noting what each does"):
        found = explore(
            program,
            options.passes,
            options.cluster,
            mesh=options.mesh,
            title=Path(options.file).name,
            optimizer_multiplier=options.optimizer,
        )
    found.save(options.output)
    print(program_line(found.program))
    print(f"wrote {options.output} ({bytes_text(len(found.html.encode()))})")
    return 0
