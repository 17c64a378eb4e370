"""The options of a run of one step. Nothing heavy is imported: `run` reads them before it starts
processes, which wait for it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardweave.driver.step.request import DEFAULT_PLAN, CompileOptions, check_given_alone, mesh_for
from shardweave.ir.mesh.mesh import Mesh, check_virtual
from shardweave.planners.registry import PLANNERS, no_such_plan

FLAGS = {option.name: option for option in fields(CompileOptions) if option.metadata}
"""Options of compile that have a flag on the command line, by name."""


def add_compile_options(command: argparse.ArgumentParser, names: Iterable[str] = FLAGS) -> None:
    """Declare the flags of some of the `CompileOptions`."""
    for option in map(FLAGS.__getitem__, names):
        kind = {"action": "store_true"} if isinstance(option.default, bool) else {}
        name = "--" + option.name.replace("_", "-")
        command.add_argument(name, default=option.default, **kind, **option.metadata)


def given_options(options: argparse.Namespace, names: Iterable[str] = FLAGS) -> dict[str, Any]:
    """Options of compile from parsed flags, by name."""
    return {name: getattr(options, name) for name in names}


@dataclass(frozen=True)
class RunOptions:
    """A model, its compile options, and what is done with the step; see the command's help."""

    model: str
    compiled: CompileOptions
    mesh: Mesh
    dtype: str
    seed: int
    check: bool
    steps: int
    eager: bool
    json: str | None
    stop_above: float = math.inf

    @property
    def plan(self) -> str:
        """The plan, in words."""
        compiled = self.compiled
        if compiled.artifact is not None:
            return f"of {getattr(compiled.artifact, 'path', compiled.artifact)}"
        if compiled.program is not None:
            return f"of {compiled.program}"
        return str(self.compiled.plan or DEFAULT_PLAN)

    @staticmethod
    def of(options: argparse.Namespace) -> RunOptions:
        """Check the options that can be checked before any process is started."""
        if options.stop_above < math.inf and not options.no_eager:
            raise ValueError(
                "--stop-above may stop the compiled training earlier than the eager training "
                "that it is compared with; add --no-eager."
            )
        if options.check and options.precision == "fp16":
            raise ValueError(
                "--check has no error bound for float16; use --precision bf16, or leave --check "
                "out."
            )
        compiled = CompileOptions(**given_options(options), seed=options.seed)
        check_given_alone(compiled)
        if compiled.artifact is not None:
            from shardweave.driver.artifact.options import with_artifact

            compiled = with_artifact(compiled)
        if compiled.plan not in (None, *PLANNERS) and not Path(str(compiled.plan)).is_file():
            raise ValueError(no_such_plan(str(compiled.plan)))
        if compiled.plan not in (None, DEFAULT_PLAN):
            from shardweave.planners.planning import check_resolvable

            check_resolvable(options.plan, sequence_parallel=compiled.sequence_parallel)
        mesh = mesh_for(compiled)
        assert mesh is not None
        if not compiled.has_processes:
            check_virtual(mesh)
        return RunOptions(
            model=options.model,
            compiled=replace(compiled, mesh=mesh),
            mesh=mesh,
            dtype=options.dtype,
            seed=options.seed,
            check=options.check,
            steps=options.steps,
            eager=not options.no_eager,
            json=options.json,
            stop_above=options.stop_above,
        )
