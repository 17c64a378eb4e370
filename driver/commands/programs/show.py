"""The `show` command: a program by its layers, or the ops of some."""

from __future__ import annotations

import argparse

from shardweave.driver.commands.arguments import Commands, new_command

PHASES = ("forward", "recompute", "backward", "optimizer")


def add_parser(commands: Commands) -> None:
    command = new_command(commands, show_command)
    command.add_program()
    command.add_argument(
        "--layer", metavar="NAME", help="show the ops of this layer, such as h.0 or h.*.attn"
    )
    command.add_argument("--phase", choices=PHASES, help="show the ops of this phase")
    command.add_argument(
        "--op", metavar="NAME", help="show the ops of this name, such as aten.mm or dist.*"
    )
    command.add_flag("--counts", "count ops instead of printing them")
    command.add_flag("--all", "print each layer, also those equal to the one before")
    command.add_flag(
        "--schedule", "show when each rank of a staged program works on which micro-batch"
    )


def show_command(options: argparse.Namespace) -> int:
    """Show a program's layers, or some of its ops."""
    from shardweave.driver.commands.read_programs import program_line, read
    from shardweave.driver.report.outline import outline, selection
    from shardweave.ir.program.staged import is_staged
    from shardweave.ir.verify.program import check
    from shardweave.planners.lowering.stages.picture import picture_of, schedule_table_of

    program = read(options.file)
    check(program)
    if options.schedule:
        if not is_staged(program):
            raise ValueError(
                "the program has no stages, so that it has no schedule of micro-batches; run the "
                "pass cut-stages on it first."
            )
        print(picture_of(*schedule_table_of(program)))
        return 0
    wanted = {"layer": options.layer, "phase": options.phase, "op": options.op}
    if all(pattern is None for pattern in wanted.values()):
        print(program_line(program))
        print(outline(program, is_folded=not options.all))
        return 0
    print(selection(program, wanted, is_counted=options.counts, is_folded=not options.all))
    return 0
