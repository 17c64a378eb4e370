"""The `simulate` command: predict the time and memory of a step on a cluster."""

from __future__ import annotations

import argparse
import json
import sys

from shardweave.driver.commands.arguments import Commands, PictureFile, new_command, optimizer_state


def add_parser(commands: Commands) -> None:
    command = new_command(commands, simulate_command)
    command.add_argument(
        "file",
        metavar="FILE",
        help="the text of a local or staged program, or with --plan of a captured one; - reads "
        "standard input",
    )
    command.add_cluster()
    command.add_argument(
        "--plan", metavar="FILE", help="simulate the program under this plan, stages and ZeRO too"
    )
    command.add_load()
    command.add_output("write a trace for ui.perfetto.dev there", "--trace")
    command.add_output("write a picture of the streams there", "--plot", type=PictureFile)
    command.add_flag("--json", "print the numbers as JSON instead")
    command.add_optimizer()
    command.add_update()


def simulate_command(options: argparse.Namespace) -> int:
    """Predict the time and memory of a step on a cluster."""
    from shardweave.driver.commands.read_programs import note_what_is_simulated, read
    from shardweave.driver.report.plan import print_throughput
    from shardweave.ir.verify.program import check
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.predict.predict import predicted_of, simulate_step

    program = read(options.file)
    check(program)
    if options.plan is None:
        note_what_is_simulated(options.cluster, program)
    elif program.is_local:
        raise ValueError(
            f"'{options.file}' is a local program, already partitioned for one rank; with --plan "
            "give the global program, which `shardweave capture` writes."
        )
    simulation = simulate_step(
        program,
        options.cluster,
        plan=options.plan,
        optimizer_multiplier=optimizer_state(options),
        update=options.update,
    )
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
