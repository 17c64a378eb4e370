"""Programs as the commands read, write and summarise them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from shardweave.ir.annotations import phase_of
from shardweave.ir.program import Program
from shardweave.ir.staged import ops_of_parts
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.planners.cost.quantity import bytes_text


def program_line(program: Program) -> str:
    """One line: how many ops in which phases, and how much is trained."""
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
    """The program in a file, or on standard input. Raises ValueError for a model's name."""
    if path == "-":
        return Program.parse(sys.stdin.read(), "<stdin>")
    if ":" in path and not Path(path).exists():
        raise ValueError(
            f"there is no file '{path}'; this command reads a program: if that is a model, write "
            f"its program first, by `shardweave capture {path} -o step.mlir`."
        )
    return Program.load(path)


def write(program: Program, path: str) -> None:
    """Write a program to a file, with source lines, or plain to standard output."""
    if path == "-":
        print(program, end="")
    else:
        program.save(path)
        print(f"wrote {path} ({bytes_text(Path(path).stat().st_size)})")
