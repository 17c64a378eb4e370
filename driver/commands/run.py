"""The `run` command: starts the mesh's processes, or is one of them.

Nothing heavy is imported before the processes are started: they wait for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.driver.commands.output import check_output
from shardweave.driver.launch import end_process, is_worker, launch
from shardweave.ir.mesh import Mesh
from shardweave.planners.registry import PLANNERS, no_such_plan


@dataclass(frozen=True)
class RunOptions:
    """What to run; see the command's help."""

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
    validate_limit: float | None
    program: str | None = None

    @staticmethod
    def of(given: argparse.Namespace) -> RunOptions:
        """Check the options that can be checked before any process is started."""
        check_output(given.json)
        if given.plan not in PLANNERS and not Path(given.plan).is_file():
            raise ValueError(no_such_plan(given.plan))
        mesh = Mesh.parse(given.mesh)
        if given.program is not None:
            mesh = _mesh_of_program(given)
        elif given.plan not in PLANNERS:
            from shardweave.driver.plans import mesh_of_plan

            of_plan = mesh_of_plan(given.plan)
            mesh = mesh if given.mesh or of_plan is None else of_plan
        return RunOptions(
            model=given.model,
            mesh=mesh,
            plan=given.plan,
            backend=given.backend,
            dtype=given.dtype,
            seed=given.seed,
            sequence_parallel=given.sequence_parallel,
            passes=given.passes,
            check=given.check,
            steps=given.steps,
            eager=not given.no_eager,
            json=given.json,
            validate=given.validate,
            validate_limit=given.validate_limit,
            program=given.program,
        )


def _mesh_of_program(given: argparse.Namespace) -> Mesh:
    """The mesh of --program, which is run as it is. Raises ValueError for what it rules out."""
    from shardweave.ir.program import Program

    if given.mesh or given.passes or given.sequence_parallel or given.validate:
        raise ValueError(
            "--program runs a program as it is, on its own mesh; leave --mesh, --passes, "
            "--sequence-parallel and --validate out, or give them to what makes the program."
        )
    return Program.load(given.program).mesh or Mesh()


def run_command(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start a process for each device, or run as one of those that torchrun or we started."""
    options = RunOptions.of(given)
    num_processes = options.mesh.num_devices if options.backend != "reference" else 1
    if num_processes > 1 and not is_worker():
        command = [sys.executable, "-m", "shardweave", *arguments]
        launch(command, num_processes, time_limit_s=given.time_limit)
        return 0
    from shardweave.driver.measure import run_and_report

    run_and_report(options)
    if is_worker():
        end_process(0)
    return 0
