"""The options of `opt` that say which passes run and what is seen of them.

Imports nothing heavy: they are declared for `--help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardweave.passes.observer import Observer
    from shardweave.passes.pipeline import PassPipeline


def add_pass_options(command: argparse.ArgumentParser) -> None:
    """Declare the options, but for the passes themselves."""
    command.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file that registers passes of one's own (sw.register_pass)",
    )
    command.add_argument(
        "--stop-after", metavar="PASS", help="run no pass after the first of this name"
    )
    command.add_argument(
        "--print-after-change",
        action="store_true",
        help="print what each pass changes, as a diff, on standard error",
    )
    for when in ("before", "after"):
        command.add_argument(
            f"--print-{when}",
            action="append",
            default=[],
            metavar="PASS",
            help=f"print the program {when} this pass, on standard error",
        )
    command.add_argument(
        "--dump-dir",
        metavar="FOLDER",
        help="write the program there: 000-input.mlir, 001-<first pass>.mlir, ...",
    )
    command.add_argument(
        "--time-passes", action="store_true", help="print the seconds and the ops of each pass"
    )
    command.add_argument(
        "--verify-each",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify the program after each pass, not at the end alone (default: yes)",
    )
    command.add_argument(
        "--print-pipeline", action="store_true", help="print the passes with presets written out"
    )
    command.add_argument(
        "--list-passes", action="store_true", help="list the passes and presets and end"
    )


def pipeline_of(options: argparse.Namespace) -> PassPipeline:
    """The pipeline that the options name. Raises ValueError for passes that it does not have."""
    from shardweave.passes.pipeline import PassPipeline

    pipeline = PassPipeline(options.passes)
    if options.stop_after is not None:
        pipeline = pipeline.until(options.stop_after)
    for name in (*options.print_before, *options.print_after):
        pipeline.until(name)  # says what there is, if it is not there
    return pipeline


def load_passes(paths: Sequence[str]) -> None:
    """Run Python files that register passes. Raises ValueError for what is no such file."""
    for path in paths:
        file = Path(path)
        if not file.is_file() or file.suffix != ".py":
            raise ValueError(f"--load {path}: expected a Python file that registers passes.")
        # A name of its own: a file may be called as a module that is there already.
        name = f"shardweave_loaded_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def observers_of(options: argparse.Namespace) -> list[Observer]:
    """What the options ask to see. A failing pass always leaves the program before it in a file."""
    from shardweave.passes.observers import DumpFiles, KeepFailed, PrintChanges, PrintPrograms

    found: list[Observer] = [DumpFiles(options.dump_dir) if options.dump_dir else KeepFailed()]
    if options.print_after_change:
        found.append(PrintChanges())
    if options.print_before or options.print_after:
        found.append(PrintPrograms(options.print_before, options.print_after))
    return found


def list_of_passes() -> str:
    """A line for each pass and each preset."""
    from inspect import getdoc

    from shardweave.passes.pipeline import pass_class
    from shardweave.passes.presets import PREFIX, SUMMARIES
    from shardweave.passes.registry import PASSES

    passes = {name: (getdoc(pass_class(name)) or "").splitlines()[0] for name in PASSES}
    presets = {PREFIX + name: text for name, text in SUMMARIES.items()}
    rows = [*sorted(passes.items()), *sorted(presets.items())]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}} {text}" for name, text in rows)
