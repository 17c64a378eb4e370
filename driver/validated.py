"""run_passes, as `sw.run_passes`: with validation if it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor
from xdsl.passes import ModulePass

from shardweave.driver.validate import LIMIT, Validator
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.passes import pipeline


def run_passes(
    program: Program,
    passes: str | Iterable[ModulePass | str],
    *,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    validate: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
    validate_limit: float = LIMIT,
    dump_dir: str | Path | None = None,
) -> Program:
    """Run passes over a copy of a program, on `mesh` if one is given.

    validate: run the program before and after each pass, in float64 and on all ranks of the
    virtual mesh, and compare outputs, gradients and buffers. inputs: tensors to validate with,
    by the names of inputs; by default all arguments are random. validate_limit: the work, in
    FLOPs of one run, up to which programs are validated. dump_dir: a folder for the program
    before the first pass and after each, as numbered files; of a failing pass, what it was given.

    Raises PassError if a pass fails, ValidationError (a PassError) if it changes a result, and
    TooLargeError (a ValueError) for a program above the limit.
    """
    validator = Validator(inputs=inputs, limit=validate_limit) if validate else None
    return pipeline.run_passes(program, passes, mesh=mesh, dump_dir=dump_dir, observer=validator)
