"""The `opt` command: passes over a program, and what is seen of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardweave.driver.commands.arguments import Command, Commands, messages, new_command
from shardweave.driver.step.run_options import add_compile_options

if TYPE_CHECKING:
    from shardweave.driver.checking.validate import Validator
    from shardweave.ir.program.program import Program
    from shardweave.passes.observers import Observer, PassWatch
    from shardweave.passes.pipeline import PassPipeline


def add_parser(commands: Commands) -> None:
    command = new_command(commands, opt_command)
    command.add_argument(
        "file", metavar="FILE", nargs="?", help="a program's text; - reads standard input"
    )
    command.add_passes()
    command.add_argument("--mesh", help="such as data=2,tensor=2; default: the program's own")
    command.add_program_output()
    _add_pass_options(command)
    add_compile_options(command, ("validate", "validate_limit"))
    command.add_flag(
        "--prove",
        "prove, without running it, that the program after each pass computes what the captured "
        "one does",
    )


def opt_command(options: argparse.Namespace) -> int:
    """Run passes over a program."""
    from shardweave.driver.checking.validate import LIMIT, Prover, Validator
    from shardweave.driver.commands.read_programs import read, write
    from shardweave.ir.verify.program import check
    from shardweave.passes.observers import Observers, PassWatch
    from shardweave.passes.pipeline import as_mesh

    if options.list_passes:
        print(list_of_passes())
        return 0
    pipeline = pipeline_of_options(options)
    if options.print_pipeline:
        print(pipeline)
        return 0
    if options.file is None:
        raise ValueError("opt needs the FILE to read; give its path, or - for standard input.")
    program = read(options.file)
    if options.mesh is not None:
        program.set_mesh(as_mesh(options.mesh))
    check(program)
    watch, validator = PassWatch(), None
    observers = observers_of(options, pipeline)
    if options.validate:
        validator = Validator(limit=options.validate_limit or LIMIT)
        observers.append(validator)
    if options.prove:
        observers.append(Prover())
    observer = Observers((*observers, watch))
    result = pipeline.run(program, observer=observer, verify_each=options.verify_each)
    _print_summary(result, options, watch, validator)
    write(result, options.output)
    return 0


def _print_summary(
    result: Program, options: argparse.Namespace, watch: PassWatch, validator: Validator | None
) -> None:
    from shardweave.driver.commands.read_programs import program_line
    from shardweave.planners.cost.quantity import seconds_text

    changed = sum(p.changed for p in watch.seen)
    out = messages(options.output)
    print(
        f"{len(watch.seen)} passes, {changed} of which changed the program, in "
        f"{seconds_text(sum(p.seconds for p in watch.seen))}: {program_line(result)}",
        file=out,
    )
    if validator is not None:
        compared = f"{validator.num_values} values compared in {validator.num_runs} runs"
        print(f"validated every pass: {compared}", file=out)
    if options.prove:
        print("proved every pass, without running the program", file=out)
    if options.time_passes:
        print(watch.table(), file=out)


def _add_pass_options(command: Command) -> None:
    command.add_load()
    command.add_argument(
        "--stop-after", metavar="PASS", help="run no pass after the first of this name"
    )
    command.add_flag(
        "--print-after-change", "print what each pass changes, as a diff, on standard error"
    )
    for when in ("before", "after"):
        command.add_argument(
            f"--print-{when}",
            action="append",
            default=[],
            metavar="PASS",
            help=f"print the program {when} this pass, on standard error",
        )
    command.add_flag("--print-after-all", "print the program after each pass, on standard error")
    command.add_argument(
        "--dump-dir",
        metavar="FOLDER",
        help="write the program there: 000-input.mlir, 001-<first pass>.mlir, ...",
    )
    command.add_flag("--time-passes", "print the seconds and the ops of each pass")
    command.add_argument(
        "--verify-each",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify the program after each pass, not only at the end (default: yes)",
    )
    command.add_flag("--print-pipeline", "print the passes with presets written out")
    command.add_flag("--list-passes", "list the passes and presets and end")


def pipeline_of_options(options: argparse.Namespace) -> PassPipeline:
    """The pipeline that the options name. ValueError for passes that the pipeline does not have."""
    from shardweave.passes.pipeline import PassPipeline

    pipeline = PassPipeline(options.passes)
    if options.stop_after is not None:
        pipeline = pipeline.until(options.stop_after)
    for name in (*options.print_before, *options.print_after):
        pipeline.until(name)  # an error lists the passes if there is none of this name
    return pipeline


def observers_of(options: argparse.Namespace, pipeline: PassPipeline) -> list[Observer]:
    """Observers that the options ask for; a failing pass always dumps the program before it."""
    from shardweave.passes.observers import DumpFiles, NameDump, PrintChanges, PrintPrograms

    observers: list[Observer] = [DumpFiles(options.dump_dir) if options.dump_dir else NameDump()]
    if options.print_after_change:
        observers.append(PrintChanges())
    every = [p.name for p in pipeline.passes] if options.print_after_all else []
    after = every or options.print_after
    if options.print_before or after:
        observers.append(PrintPrograms(options.print_before, after))
    return observers


def list_of_passes() -> str:
    """A line for each pass and each preset."""
    from inspect import getdoc

    from shardweave.passes.presets import PREFIX, SUMMARIES
    from shardweave.passes.registry import PASSES, find_pass

    passes = {name: (getdoc(find_pass(name)) or "").splitlines()[0] for name in PASSES}
    presets = {PREFIX + name: text for name, text in SUMMARIES.items()}
    rows = [*sorted(passes.items()), *sorted(presets.items())]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}} {text}" for name, text in rows)
