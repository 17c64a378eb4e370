"""The processes that run a step together: how many there are, and how they find each other."""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardweave.backends.watch import watchdog
from shardweave.backends.watch.watch import LostRankError
from shardweave.driver.processes import rendezvous
from shardweave.driver.processes.launch import is_launched, is_worker, report_failure, store_file
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.quantity import counted

T = TypeVar("T")

SETTLE_S = 0.2


def world_size() -> int:
    """Number of processes: of torch.distributed if it is initialised, else as torchrun says."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_worker() else 1


def rank() -> int:
    """Rank of this process, from 0 to `world_size()` - 1."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_worker() else 0


def local_device(num_processes: int) -> torch.device:
    """This rank's device: its own GPU if this machine has enough, else the CPU. num_processes:
    number of all ranks; torchrun says how many of them run here."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if not torch.cuda.is_available() or torch.cuda.device_count() < here:
        return torch.device("cpu")
    return with_index(torch.device("cuda"))


def with_index(device: torch.device) -> torch.device:
    """Give a `cuda` device without an index the index of this rank on this machine."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def join(mesh: Mesh, device: torch.device, timeout_s: float | None = None) -> None:
    """Make sure that one process per device of `mesh` runs, joined by torch.distributed.

    timeout_s: how long a rank may wait for others, as for the watchdog's `start`.
    Initialises torch.distributed (NCCL for a GPU, else gloo) if nobody has and the mesh needs
    it. Raises ValueError unless there is one process for each device of the mesh.
    """
    processes = world_size()
    if processes != mesh.num_devices:
        raise ValueError(_mismatch(mesh, processes))
    if mesh.num_devices == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _settle_at_exit()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        rendezvous.initialise(backend, store_file(), watchdog.timeout_of(timeout_s))
    if is_launched():
        watchdog.listen(_report)
    watchdog.start(timeout_s)


def _report(text: str) -> None:
    report_failure(LostRankError(text), is_plain=True)


@cache
def _settle_at_exit() -> None:
    """Sleep before the interpreter ends: gloo's threads need it still, and abort where it ends."""
    atexit.register(time.sleep, SETTLE_S)


def from_rank_0(make: Callable[[], T]) -> T:
    """Return on every rank the result of `make` on rank 0. Collective, if there are several ranks.
    The value must be one that pickle takes. A ValueError on rank 0 is raised on every rank; another
    exception goes on there, and is a RankZeroError on the others, which would wait for it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    made: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            made = [make(), None]
            pickle.dumps(made)  # so that a failure to pickle is reported to the others too
        except Exception as error:
            told = error
            if not isinstance(error, ValueError):
                told = RankZeroError(f"rank 0 failed: {type(error).__name__}: {error}")
            dist.broadcast_object_list([None, told], src=0)
            raise
    dist.broadcast_object_list(made, src=0)
    value, error = made
    if error is not None:
        raise error
    return value


class RankZeroError(RuntimeError):
    """Raised on the other ranks if rank 0 failed at a task for all ranks."""


def leave() -> None:
    """Close torch.distributed, if it is open: other ranks complain about a rank that just exits."""
    if dist.is_initialized():
        watchdog.stop()
        dist.destroy_process_group()


def _mismatch(mesh: Mesh, number: int) -> str:
    processes = "1 process runs" if number == 1 else f"{number} processes run"
    if not mesh.axes:
        return f"no mesh is given, but {processes}; give one of {number}, such as data={number}."
    name = Path(sys.argv[0]).name
    program = name if name.endswith(".py") and name != "__main__.py" else "SCRIPT.py"
    return (
        f"the mesh {mesh} has {counted(mesh.num_devices, 'device')}, but {processes}; start "
        f"one process per device with 'torchrun --nproc-per-node {mesh.num_devices} {program}', or "
        f"give a mesh of {counted(number, 'device')}."
    )
