"""The `run` command: starts the mesh's processes, or is one of them.

Nothing heavy is imported before the processes are started: they wait for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardweave.driver.launch import end_process, is_worker, launch
from shardweave.driver.run_options import RunOptions


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
