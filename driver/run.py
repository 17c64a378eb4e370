"""The `run` command: starts the mesh's processes, or is one of them.

Nothing heavy is imported before the processes are started: they wait for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.driver.launch import end_process, is_worker, launch
from shardweave.driver.output import check_output
from shardweave.ir.mesh import Mesh
from shardweave.planners.registry import PLANNERS


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
    json: str | None

    @staticmethod
    def of(given: argparse.Namespace) -> RunOptions:
        """Check the options that can be checked before any process is started."""
        check_output(given.json)
        if given.plan not in PLANNERS and not Path(given.plan).is_file():
            raise ValueError(
                f"plan '{given.plan}' is neither a planner ({', '.join(PLANNERS)}) nor a file "
                "that exists."
            )
        return RunOptions(
            model=given.model,
            mesh=Mesh.parse(given.mesh),
            plan=given.plan,
            backend=given.backend,
            dtype=given.dtype,
            seed=given.seed,
            sequence_parallel=given.sequence_parallel,
            passes=given.passes,
            check=given.check,
            steps=given.steps,
            json=given.json,
        )


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
