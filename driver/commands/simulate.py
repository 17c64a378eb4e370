"""The `simulate` command: what a program's schedule takes on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from shardweave.driver.commands.arguments import (
    Commands,
    add_cluster,
    check_output,
    check_picture,
    new_command,
    not_negative,
)

if TYPE_CHECKING:
    from shardweave.ir.program import Program
    from shardweave.planners.cost.pipeline.simulation import PipelineSimulation
    from shardweave.planners.cost.simulation import Simulation


def add_parser(commands: Commands) -> None:
    command = new_command(commands, "simulate", "Say what a program's schedule takes on a cluster.")
    command.add_argument(
        "file",
        metavar="FILE",
        help="the text of a local or staged program, or with --plan of a captured one; - reads "
        "standard input",
    )
    add_cluster(command)
    command.add_argument(
        "--plan", metavar="FILE", help="simulate the program under this plan, stages and ZeRO too"
    )
    command.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev there")
    command.add_argument("--plot", metavar="FILE", help="write a picture of the streams there")
    command.add_argument("--json", action="store_true", help="print the numbers as JSON instead")
    command.add_argument(
        "--optimizer",
        type=not_negative("bytes of state for each byte of parameters, 0 or more"),
        metavar="X",
        help="bytes of optimizer state per byte of parameters (default: 0; with --plan 2, Adam's)",
    )
    command.set_defaults(func=simulate_command)


def simulate_command(options: argparse.Namespace) -> int:
    """Simulate a program, or one under a plan; print a summary, or the numbers as JSON."""
    from shardweave.driver.commands.programs import read
    from shardweave.ir.verify.program import check

    check_output(options.trace)
    check_picture(options.plot)
    program = read(options.file)
    check(program)
    found = _simulated(program, options)
    if options.json:
        print(json.dumps(found.record(), indent=2))
    else:
        print(found.summary())
    out = sys.stderr if options.json else sys.stdout
    if options.trace:
        found.save_trace(options.trace)
        print(f"wrote {options.trace} ({len(found.events)} events)", file=out)
    if options.plot:
        found.plot(options.plot)
        print(f"wrote {options.plot} (a picture)", file=out)
    return 0


def _simulated(program: Program, options: argparse.Namespace) -> Simulation | PipelineSimulation:
    from shardweave.driver.plans import simulate_plan
    from shardweave.passes.notes import note
    from shardweave.planners.cost.presets import find_cluster
    from shardweave.planners.predict import simulate_step

    state: float | None = options.optimizer
    if options.plan is None:
        if not program.is_local and find_cluster(options.cluster).num_devices > 1:
            note(
                "the program is global, so that one device of the cluster runs all of it; "
                "partition it first (shardweave opt --mesh data=2 --passes "
                "plan-megatron,preset:partition), or give --plan."
            )
        return simulate_step(program, options.cluster, optimizer_multiplier=state or 0.0)
    if program.is_local:
        raise ValueError(
            f"'{options.file}' is the program of one rank already; with --plan give the captured "
            "one, which `shardweave capture` writes."
        )
    return simulate_plan(program, options.plan, options.cluster, optimizer_multiplier=state)
