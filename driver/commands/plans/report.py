"""The `report` command: a step on a cluster as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardweave.driver.commands.arguments import Commands, new_command, optimizer_state


def add_parser(commands: Commands) -> None:
    command = new_command(commands, report_command)
    command.add_program()
    command.add_cluster()
    command.add_argument(
        "--plan",
        metavar="FILE",
        help="the plan, to be shown; a program without shardings is partitioned by it",
    )
    command.add_output("page to write", required=True)
    command.add_optimizer()
    command.add_update()


def report_command(options: argparse.Namespace) -> int:
    """Write what a step does as an HTML page."""
    from shardweave.driver.commands.read_programs import note_what_is_simulated, read
    from shardweave.driver.report.page import report_page
    from shardweave.driver.report.plan import print_throughput
    from shardweave.driver.report.reshards import local_with_reshards
    from shardweave.ir.sharding.flow import is_propagated
    from shardweave.ir.verify.program import check
    from shardweave.planners.cost.quantity import bytes_text
    from shardweave.planners.plan.plan import Plan
    from shardweave.planners.plan.plan_check import check_followed
    from shardweave.planners.predict.predict import predicted_of, simulate_step

    program = read(options.file)
    check(program)
    plan = Plan.load(options.plan) if options.plan else None
    if plan is not None and (program.is_local or is_propagated(program)):
        check_followed(plan, program)
    captured = program
    program, reshards = local_with_reshards(program, plan)
    note_what_is_simulated(options.cluster, program)
    simulation = simulate_step(
        program,
        options.cluster,
        optimizer_multiplier=optimizer_state(options),
        precision=plan.precision if plan else "",
        pipeline=plan.pipeline if plan else None,
        update=options.update or (plan.update if plan else ""),
    )
    title = Path(options.file).name
    page = report_page(program, simulation, title=title, plan=plan, reshards=reshards)
    Path(options.output).write_text(page)
    if plan is not None and not captured.is_local:
        print_throughput(captured, options.cluster, plan, predicted_of(simulation), sys.stdout)
    print(simulation.summary())
    print(f"wrote {options.output} ({bytes_text(len(page.encode()))})")
    return 0
