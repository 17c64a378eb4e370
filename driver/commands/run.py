"""The `run` command: starts the mesh's processes, or is one of them.

Nothing heavy is imported before the processes are started: they wait for it.
"""

from __future__ import annotations

import argparse
import math
import sys

from shardweave.driver.commands.arguments import Commands, count, new_command
from shardweave.driver.processes.launch import (
    end_after,
    end_process,
    is_launched,
    is_worker,
    launch,
)
from shardweave.driver.step.run_options import RunOptions, add_compile_options


def add_parser(commands: Commands) -> None:
    command = new_command(commands, run_command)
    command.add_model()
    add_compile_options(command)
    command.add_load()
    command.add_flag(
        "--check", "compare loss and gradients with the eager model; fail if they differ"
    )
    command.add_argument(
        "--steps",
        type=count("a number of steps, such as 3"),
        default=0,
        metavar="N",
        help="train for N steps with AdamW, and the eager model too, and time both",
    )
    command.add_flag("--no-eager", "do not train the eager model")
    command.add_argument(
        "--stop-above",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="end the training early if its first timed steps take more than this",
    )
    command.add_output("write the results there as well", "--json")
    command.add_time_limit("stop the run")


def run_command(options: argparse.Namespace) -> int:
    """Start a process for each device; in a process started so, or by torchrun, run the step."""
    run = RunOptions.of(options)
    num_processes = run.mesh.num_devices if run.compiled.has_processes else 1
    # A single process under a time limit needs another process to stop it.
    if (num_processes > 1 or options.time_limit) and not is_worker():
        command = [sys.executable, "-m", "shardweave", *options.arguments]
        launch(command, num_processes, time_limit_s=options.time_limit)
        return 0
    if options.time_limit and not is_launched():
        end_after(options.time_limit)
    from shardweave.driver.checking.measure import run_and_report

    run_and_report(run)
    if is_worker():
        end_process(0)
    return 0
