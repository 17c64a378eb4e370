"""Programs as the commands read, write and summarise them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

from shardweave.driver.models.models import example_to_trace
from shardweave.driver.report.text import status
from shardweave.ir.capture.capture import capture
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import is_staged, ops_of_parts
from shardweave.ir.verify.program import check
from shardweave.passes.notes import note
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import bytes_text


def program_line(program: Program) -> str:
    """Describe a program in one line: ops by phase, and the number of parameters trained."""
    phases = Counter(phase_of(op) for op in ops_of_parts(program))
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
    """Read the program in a file, or on standard input. Raises ValueError for a model's name."""
    if path == "-":
        return Program.parse(sys.stdin.read(), "<stdin>")
    if ":" in path and not Path(path).exists():
        raise ValueError(
            f"there is no file '{path}', and this command reads a program; if '{path}' is a "
            f"model, first write its program: `shardweave capture {path} -o step.mlir`."
        )
    return Program.load(path)


def is_text(name: str) -> bool:
    """True if `name` is a program's file or "-" (standard input), rather than a model."""
    return name == "-" or name.endswith(".mlir") or Path(name).is_file()


def read_or_capture(name: str, dtype: str = "float32") -> Program:
    """The program in a file or on standard input, or a model's step; ValueError for neither."""
    if is_text(name):
        program = read(name)
        check(program)
        return program
    with status(f"capturing {name}"):
        example = example_to_trace(name, dtype=getattr(torch, dtype))
        return capture(example.module, kwargs=example.kwargs)


def note_what_is_simulated(cluster: str, *programs: Program) -> None:
    """Print a note for each program that is simulated whole, as it is not partitioned."""
    several = find_cluster(cluster).num_devices > 1
    for text in dict.fromkeys(_run_whole(program, several) for program in programs):
        if text:
            note(text)


def _run_whole(program: Program, has_several_devices: bool) -> str:
    if not program.is_local:
        if not has_several_devices:
            return ""
        return (
            "the program is global, so that one device of the cluster runs all of it; partition "
            "it first (shardweave opt --mesh data=2 --passes plan-megatron,preset:partition), or "
            "simulate it by --plan."
        )
    stages = 1 if program.mesh is None or is_staged(program) else program.mesh.num_stages
    if stages == 1:
        return ""
    return (
        f"the mesh {program.mesh} has {stages} stages, and the program is not cut into them, so "
        "that each of them runs all of it; run the pass cut-stages on it, or simulate the captured "
        "program by --plan."
    )


def write(program: Program, path: str) -> None:
    """Write a program to a file, with source lines, or plain to standard output."""
    if path == "-":
        print(program, end="")
    else:
        program.save(path)
        print(f"wrote {path} ({bytes_text(Path(path).stat().st_size)})")
