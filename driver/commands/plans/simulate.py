"""The `simulate` command: predict the time and memory of a step on a cluster."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from shardweave.driver.commands.arguments import (
    Commands,
    PictureFile,
    add_cluster,
    add_flag,
    add_load,
    add_optimizer,
    add_output,
    add_update,
    new_command,
    optimizer_state,
)

if TYPE_CHECKING:
    from shardweave.ir.program.program import Program
    from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
    from shardweave.planners.simulate.simulation import Simulation


def add_parser(commands: Commands) -> None:
    command = new_command(commands, simulate_command)
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
    add_load(command)
    add_output(command, "write a trace for ui.perfetto.dev there", "--trace")
    add_output(command, "write a picture of the streams there", "--plot", type=PictureFile)
    add_flag(command, "--json", "print the numbers as JSON instead")
    add_optimizer(command)
    add_update(command)


def simulate_command(options: argparse.Namespace) -> int:
    """Predict the time and memory of a step on a cluster."""
    from shardweave.driver.commands.read_programs import read
    from shardweave.driver.report.plan import print_throughput
    from shardweave.ir.verify.program import check
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.predict.predict import predicted_of

    program = read(options.file)
    check(program)
    simulation = _simulated(program, options)
    if options.json:
        print(json.dumps(simulation.record(), indent=2))
    else:
        if options.plan is not None:
            plan = Plan.load(options.plan)
            print_throughput(program, options.cluster, plan, predicted_of(simulation), sys.stdout)
        print(simulation.summary())
    out = sys.stderr if options.json else sys.stdout
    if options.trace:
        simulation.save_trace(options.trace)
        print(f"wrote {options.trace} ({len(simulation.events)} events)", file=out)
    if options.plot:
        simulation.plot(options.plot)
        print(f"wrote {options.plot} (a picture)", file=out)
    return 0


def _simulated(program: Program, options: argparse.Namespace) -> Simulation | PipelineSimulation:
    from shardweave.driver.commands.read_programs import note_what_is_simulated
    from shardweave.planners.predict.predict import simulate_step

    if options.plan is None:
        note_what_is_simulated(options.cluster, program)
    elif program.is_local:
        raise ValueError(
            f"'{options.file}' is a local program, already partitioned for one rank; with --plan "
            "give the global program, which `shardweave capture` writes."
        )
    state = optimizer_state(options)
    return simulate_step(
        program,
        options.cluster,
        plan=options.plan,
        optimizer_multiplier=state,
        update=options.update,
    )
