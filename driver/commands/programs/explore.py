"""The `explore` command: what passes do to a program, as a page for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardweave.driver.commands.arguments import (
    Commands,
    add_cluster,
    add_optimizer,
    add_output,
    add_passes,
    add_program,
    new_command,
    optimizer_state,
)

if TYPE_CHECKING:
    from shardweave.driver.explore import Exploration
    from shardweave.ir.program.program import Program


def add_parser(commands: Commands) -> None:
    command = new_command(commands, explore_command)
    add_program(command)
    add_passes(command)
    add_cluster(command)
    command.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="FILE",
        help="in place of passes: those of this plan; several are shown beside one another",
    )
    command.add_argument("--mesh", help="such as data=2,tensor=2; default: the program's own")
    add_output(command, "page to write", required=True)
    add_optimizer(command)


def explore_command(options: argparse.Namespace) -> int:
    """Show what each pass does, as an HTML page."""
    from shardweave.driver.commands.read_programs import program_line, read
    from shardweave.driver.report.text import status
    from shardweave.planners.cost.quantity import bytes_text

    if options.plan and (options.passes or options.mesh):
        raise ValueError(
            "--plan sets the passes and the mesh; leave out --passes and --mesh, or name the "
            "plan among the passes: --passes 'apply-plan{file=\"plan.json\"},...'."
        )
    program = read(options.file)
    with status("running passes, and noting what each does"):
        page = _explored(program, options)
    page.save(options.output)
    print(program_line(page.program))
    print(f"wrote {options.output} ({bytes_text(len(page.html.encode()))})")
    return 0


def _explored(program: Program, options: argparse.Namespace) -> Exploration:
    from shardweave.driver.explore import explore
    from shardweave.ir.mesh.mesh import Mesh
    from shardweave.planners.lowering.plan_passes import plan_passes
    from shardweave.planners.lowering.stages.choose import with_pipeline
    from shardweave.planners.plan.plan import Plan

    passes, mesh, plan = options.passes, options.mesh, Plan()
    if len(options.plan) > 1:
        names = {path: Path(path).name for path in options.plan}
        are_distinct = len(set(names.values())) == len(options.plan)
        passes = {names[path] if are_distinct else path: Plan.load(path) for path in options.plan}
    elif options.plan:
        plan = Plan.load(options.plan[0])
        mesh = plan.mesh
        passes = plan_passes(with_pipeline(plan, program, Mesh(**mesh)))
    return explore(
        program,
        passes,
        options.cluster,
        mesh=mesh,
        title=Path(options.file).name,
        optimizer_multiplier=optimizer_state(options),
        precision=plan.precision,
        update=plan.update,
    )
