"""The options of a run of one step. Nothing heavy is imported: `run` reads them before it starts
processes, which wait for it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path

from shardweave.driver.commands.arguments import check_output
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.registry import PLANNERS, no_such_plan

DEFAULT_PLAN = "megatron"
"""Of the command `run`: a rule that takes every option, so that nothing has to be imported to check
it."""

BACKENDS = ("distributed", "reference", "triton")


@dataclass(frozen=True)
class RunOptions:
    """A model, how it is sharded and what is done with it; see the command's help."""

    model: str
    mesh: Mesh
    plan: str
    backend: str
    dtype: str
    seed: int
    sequence_parallel: bool
    passes: str
    check: bool
    steps: int
    eager: bool
    json: str | None
    validate: bool
    prove: bool
    validate_limit: float | None
    stop_above: float = math.inf
    program: str | None = None

    @staticmethod
    def of(options: argparse.Namespace) -> RunOptions:
        """Check the options that can be checked before any process is started."""
        check_output(options.json)
        if options.stop_above < math.inf and not options.no_eager:
            raise ValueError(
                "--stop-above may end the step's training before the eager model's, with which it "
                "is compared; give --no-eager too."
            )
        if options.plan not in PLANNERS and not Path(options.plan).is_file():
            raise ValueError(no_such_plan(options.plan))
        mesh = Mesh.parse(options.mesh)
        if options.program is not None:
            mesh = _mesh_of_program(options)
        elif options.plan != DEFAULT_PLAN:
            from shardweave.planners.planning import check_resolvable, mesh_of_plan

            check_resolvable(options.plan, sequence_parallel=options.sequence_parallel)
            of_plan = mesh_of_plan(options.plan)
            mesh = mesh if options.mesh or of_plan is None else of_plan
        given = vars(options) | {"mesh": mesh, "eager": not options.no_eager}
        return RunOptions(**{one.name: given[one.name] for one in fields(RunOptions)})


def _mesh_of_program(options: argparse.Namespace) -> Mesh:
    """The mesh of --program, which is run as it is. Raises ValueError for what it rules out."""
    from shardweave.ir.program.program import Program

    ruled_out = (options.mesh, options.passes, options.sequence_parallel, options.validate)
    if any(ruled_out) or options.prove:
        raise ValueError(
            "--program runs a program as it is, on its own mesh; leave --mesh, --passes, "
            "--sequence-parallel, --validate and --prove out, or give them to what makes the "
            "program."
        )
    return Program.load(options.program).mesh or Mesh()
