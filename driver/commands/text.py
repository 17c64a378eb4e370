"""The commands whose result is a program's text: `capture` and `opt`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from shardweave.driver.commands.output import check_output
from shardweave.driver.commands.pass_options import (
    list_of_passes,
    load_passes,
    observers_of,
    pipeline_of,
)
from shardweave.driver.models import announce, build_example
from shardweave.driver.report.text import bytes_text, seconds_text, status
from shardweave.driver.validate import LIMIT, Validator
from shardweave.ir.annotations import phase_of
from shardweave.ir.capture.capture import capture
from shardweave.ir.program import Program
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.ir.verify.program import check
from shardweave.passes.observers import Observers, PassWatch
from shardweave.passes.pipeline import as_mesh


def capture_command(options: argparse.Namespace) -> int:
    """Capture a named model and write its program."""
    if options.mesh is not None:
        raise ValueError(
            "capture writes the global program, which is for any mesh; give --mesh to what "
            f"shards it: 'shardweave opt FILE --mesh {options.mesh} --passes ...', or 'shardweave "
            f"run {options.model} --mesh {options.mesh}'."
        )
    check_output(options.output)
    dtype = getattr(torch, options.dtype)
    announce(options.model, dtype)
    with status(f"building {options.model}"):
        example = build_example(options.model, dtype=dtype, seed=options.seed)
    start_s = time.perf_counter()
    with status(f"capturing {options.model}"):
        program = capture(example.module, kwargs=example.kwargs, train=not options.eval)
    seconds = time.perf_counter() - start_s
    out = messages(options.output)
    for text in example.notes:
        print(f"note: {text}", file=out)
    print(f"captured {options.model} in {seconds:.1f} s: {describe(program)}", file=out)
    write(program, options.output)
    return 0


def opt_command(options: argparse.Namespace) -> int:
    """Run passes over a program and write the result."""
    load_passes(options.load)
    if options.list_passes:
        print(list_of_passes())
        return 0
    pipeline = pipeline_of(options)
    if options.print_pipeline:
        print(pipeline)
        return 0
    if options.file is None:
        raise ValueError("opt needs the FILE to read; give its path, or - for standard input.")
    check_output(options.output)
    program = read(options.file)
    if options.mesh is not None:
        program.set_mesh(as_mesh(options.mesh))
    check(program)
    watch, validator = PassWatch(), None
    observers = observers_of(options)
    if options.validate:
        validator = Validator(limit=options.validate_limit or LIMIT)
        observers.append(validator)
    observer = Observers((*observers, watch))
    result = pipeline.run(program, observer=observer, verify_each=options.verify_each)
    changed = sum(one.changed for one in watch.seen)
    out = messages(options.output)
    print(
        f"{len(watch.seen)} passes, {changed} of which changed the program, in "
        f"{seconds_text(sum(one.seconds for one in watch.seen))}: {describe(result)}",
        file=out,
    )
    if validator is not None:
        compared = f"{validator.num_values} values compared in {validator.num_runs} runs"
        print(f"validated every pass: {compared}", file=out)
    if options.time_passes:
        print(watch.table(), file=out)
    write(result, options.output)
    return 0


def messages(output: str) -> TextIO:
    """Where to say what was done: not where the program's text goes."""
    return sys.stderr if output == "-" else sys.stdout


def describe(program: Program) -> str:
    """One line: how many ops in which phases, and how much is trained."""
    phases: dict[str, int] = {}
    for op in program.ops:
        phases[phase_of(op)] = phases.get(phase_of(op), 0) + 1
    by_phase = ", ".join(f"{count} {phase}" for phase, count in phases.items())
    parameters = [slot.value for slot in program.arguments if slot.kind == "param"]
    size = bytes_text(sum(num_bytes(tensor_type_of(value)) for value in parameters))
    mesh = f", on mesh {program.mesh}" if program.mesh else ""
    whose = " on each rank" if program.is_local else ""
    return (
        f"{sum(phases.values())} ops ({by_phase}), {len(parameters)} parameters of "
        f"{size}{whose}{mesh}"
    )


def read(path: str) -> Program:
    """The program in a file, or on standard input."""
    if path == "-":
        return Program.parse(sys.stdin.read(), "<stdin>")
    return Program.load(path)


def write(program: Program, path: str) -> None:
    """Write a program to a file, with source lines, or plain to standard output."""
    if path == "-":
        print(program, end="")
    else:
        program.save(path)
        print(f"wrote {path} ({bytes_text(Path(path).stat().st_size)})")
