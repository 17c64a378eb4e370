"""The `plan` command: runs a planner, and prints the plan and its reasons."""

from __future__ import annotations

import argparse

from shardweave.driver.commands.arguments import (
    DTYPES,
    MODEL_HELP,
    Commands,
    PictureFile,
    new_command,
)
from shardweave.planners.registry import DEFAULT_PLANNER, PLANNERS


def add_parser(commands: Commands) -> None:
    command = new_command(commands, plan_command)
    command.add_argument(
        "file", metavar="PROGRAM", help=f"a captured program's text, or a model: {MODEL_HELP}"
    )
    command.add_cluster(required=False, why="needed by all but rules on a given mesh: ")
    command.add_argument(
        "--planner", metavar="NAME",
        help=f"{', '.join(PLANNERS)} (default: {DEFAULT_PLANNER})",
    )  # fmt: skip
    command.add_argument(
        "--mesh", default="", help="such as data=2,tensor=2; default: the planner chooses"
    )
    command.add_argument(
        "-O",
        dest="option",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the planner; may be given several times",
    )
    for name, what in (
        ("--fix", "consider only plans with this value, such as tensor=8"),
        ("--forbid", "consider no plan with this value, such as zero=3"),
    ):
        help_text = f"{what}; repeat, or separate by commas"
        command.add_argument(
            name, action="append", default=[], metavar="DIMENSION=VALUE", help=help_text
        )
    command.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each device that a plan may use, such as 70GiB (default: all)",
    )
    command.add_time_limit("take the best plan so far")
    command.add_output("write the plan there; - for standard output")
    command.add_flag("--explain", "show the best plans: time and memory by part, and why each lost")
    command.add_argument(
        "--compare", metavar="A,B", help="compare two planners or plan files, and write no plan"
    )
    command.add_flag(
        "--show-passes",
        "print the passes that carry out the plan, in the form of a plan's 'passes'",
    )
    command.add_update()
    command.add_load()
    command.add_output("draw the best plans there", "--plot", type=PictureFile)
    command.add_argument("--dtype", choices=DTYPES, help=f"dtype of a model (default: {DTYPES[0]})")


def plan_command(options: argparse.Namespace) -> int:
    """Choose how to train a program on a cluster."""
    from shardweave.driver.commands.plans.planning import plan_program

    return plan_program(options)
