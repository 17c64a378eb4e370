"""The commands whose result is a program's text: `capture` and `opt`."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from xdsl.passes import ModulePass

from shardweave.driver.models import announce, build_example
from shardweave.driver.output import check_output
from shardweave.driver.report import bytes_text, seconds_text, status
from shardweave.driver.validate import LIMIT, Observers, Validator
from shardweave.ir.capture import capture
from shardweave.ir.program import Program
from shardweave.ir.syntax import phase_of
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.ir.verify import check
from shardweave.passes.pipeline import Observer, PassPipeline, as_mesh, pass_class
from shardweave.passes.registry import PASSES


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
    if options.list_passes:
        for name in sorted(PASSES):
            summary = (inspect.getdoc(pass_class(name)) or "").splitlines()[0]
            print(f"{name:24} {summary}")
        return 0
    if options.file is None:
        raise ValueError("opt needs the FILE to read; give its path, or - for standard input.")
    check_output(options.output)
    pipeline = PassPipeline(options.passes)
    program = read(options.file)
    if options.mesh is not None:
        program.set_mesh(as_mesh(options.mesh))
    check(program)
    watch = PassWatch(print_after_change=options.print_after_change)
    observer, validator = watch, None
    if options.validate:
        validator = Validator(limit=options.validate_limit or LIMIT)
        observer = Observers((validator, watch))
    result = pipeline.run(program, observer=observer)
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
        for one in watch.seen:
            unchanged = "" if one.changed else "  (no change)"
            print(f"{one.seconds:9.3f} s  {one.spec}{unchanged}", file=out)
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


@dataclass(frozen=True)
class SeenPass:
    """What one pass did."""

    spec: str
    seconds: float
    changed: bool


@dataclass
class PassWatch(Observer):
    """Times each pass and notices whether it changed the program."""

    print_after_change: bool = False
    seen: list[SeenPass] = field(default_factory=list)
    _before: Program | None = None
    _start_s: float = 0.0

    def before(self, one: ModulePass, program: Program) -> None:
        self._before = program.clone()
        self._start_s = time.perf_counter()

    def after(self, one: ModulePass, program: Program) -> None:
        seconds = time.perf_counter() - self._start_s
        changed = program != self._before
        self.seen.append(SeenPass(str(one.spec()), seconds, changed))
        if changed and self.print_after_change:
            print(f"// after {one.spec()}\n{program}", end="", file=sys.stderr)
