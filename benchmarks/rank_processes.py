"""Processes of a benchmark, one for each rank, each on a core of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import shaped_link
import torch.distributed as dist

Process = subprocess.Popen[bytes]


def run_ranks(
    num_ranks: int, start: Callable[[int, int], Process], timeout_s: float, what: str = "a worker"
) -> None:
    """Run `start(rank, port)` for each rank, and wait for all; none is left.

    Raises SystemExit, naming `what`, if one fails, and TimeoutExpired.
    """
    workers: list[Process] = []
    port = free_port()
    try:
        for rank in range(num_ranks):
            workers.append(start(rank, port))
        for worker in workers:
            if worker.wait(timeout=timeout_s):
                raise SystemExit(f"{what} failed with status {worker.returncode}")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def end_with(rows: list[dict[str, Any]], settings: Mapping[str, Any]) -> None:
    """Leave the process group once all ranks are here; rank 0 writes the rows to the file `out` of
    the settings."""
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def rows_of_ranks(
    script: Path,
    settings: Mapping[str, Any],
    num_ranks: int,
    rate: str,
    *,
    timeout_s: float,
    what: str = "a worker",
) -> list[dict[str, Any]]:
    """What rank 0 of a script's processes writes to the file `out` of its settings, as JSON.

    rate: of their links, each on a node of `shaped_link`; empty: all on this one. Raises as
    `run_ranks` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        told = {**settings, "out": str(out)}
        run_ranks(num_ranks, partial(start_worker, script, told, num_ranks, rate), timeout_s, what)
        return json.loads(out.read_text())


def start_worker(
    script: Path, settings: dict[str, Any], num_ranks: int, rate: str, rank: int, port: int
) -> Process:
    """A process of a script: with a rate on a node of `shaped_link`, else on this one."""
    local = [], {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    prefix, variables = shaped_link.on_node(rank) if rate else local
    return start_rank(script, json.dumps(settings), rank, num_ranks, port, prefix, variables)


def start_rank(
    script: Path,
    settings: str,
    rank: int,
    num_ranks: int,
    port: int,
    prefix: Sequence[str],
    variables: Mapping[str, str],
) -> Process:
    """A process of a script, with torchrun's variables. prefix, variables: of where it runs."""
    environment = os.environ | {
        **variables,
        "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": str(2**30),
        "MALLOC_MMAP_THRESHOLD_": str(2**30), "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    core = str(rank % (os.cpu_count() or 1))
    command = [*prefix, "taskset", "-c", core, sys.executable, str(script), settings]
    return subprocess.Popen(command, env=environment)


def path_of_package() -> str:
    """PYTHONPATH with the folder that holds the package, whatever its clone is called, first."""
    import shardweave

    folder, given = Path(shardweave.__file__).parents[1], os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(folder), *([given] if given else [])])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
