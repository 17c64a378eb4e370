"""The `explore` command: what passes do to a program, as a page for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardweave.driver.commands.arguments import Commands, new_command, optimizer_state


def add_parser(commands: Commands) -> None:
    command = new_command(commands, explore_command)
    command.add_program()
    command.add_passes()
    command.add_cluster()
    command.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="FILE",
        help="in place of passes: those of this plan; several are shown beside one another",
    )
    command.add_argument("--mesh", help="such as data=2,tensor=2; default: the program's own")
    command.add_output("page to write", required=True)
    command.add_optimizer()


def explore_command(options: argparse.Namespace) -> int:
    """Show what each pass does, as an HTML page."""
    from shardweave.driver.commands.read_programs import program_line, read
    from shardweave.driver.explore import explore
    from shardweave.driver.report.text import status
    from shardweave.ir.mesh.mesh import Mesh
    from shardweave.planners.cost.quantity import bytes_text
    from shardweave.planners.lowering.plan_passes import plan_passes
    from shardweave.planners.lowering.stages.choose import with_pipeline
    from shardweave.planners.plan.plan import Plan

    if options.plan and (options.passes or options.mesh):
        raise ValueError(
            "--plan sets the passes and the mesh; leave out --passes and --mesh, or name the "
            "plan among the passes: --passes 'apply-plan{file=\"plan.json\"},...'."
        )
    program = read(options.file)
    passes, mesh, plan = options.passes, options.mesh, Plan()
    with status("running passes, and noting what each does"):
        if len(options.plan) > 1:
            names = {path: Path(path).name for path in options.plan}
            are_distinct = len(set(names.values())) == len(options.plan)
            passes = {names[p] if are_distinct else p: Plan.load(p) for p in options.plan}
        elif options.plan:
            plan = Plan.load(options.plan[0])
            mesh = plan.mesh
            passes = plan_passes(with_pipeline(plan, program, Mesh(**mesh)))
        page = explore(
            program,
            passes,
            options.cluster,
            mesh=mesh,
            title=Path(options.file).name,
            optimizer_multiplier=optimizer_state(options),
            precision=plan.precision,
            update=plan.update,
        )
    page.save(options.output)
    print(program_line(page.program))
    print(f"wrote {options.output} ({bytes_text(len(page.html.encode()))})")
    return 0
