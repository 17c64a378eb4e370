"""The processes that run a step together: how many there are, and how they find each other."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardweave.driver.launch import store_file
from shardweave.ir.mesh import Mesh


def is_worker() -> bool:
    """Whether torchrun, or `shardweave run`, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """Number of processes: of torch.distributed if it is initialised, else as torchrun says."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_worker() else 1


def rank() -> int:
    """This process's number among `world_size()`."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_worker() else 0


def local_device(num_processes: int) -> torch.device:
    """This rank's device: a GPU of its own where this machine has enough of them, else the CPU.

    num_processes: how many ranks run in all; torchrun says how many of them run here.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if not torch.cuda.is_available() or torch.cuda.device_count() < here:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def join(mesh: Mesh, device_type: str) -> None:
    """Make sure that one process per device of `mesh` runs, joined by torch.distributed.

    Initialises torch.distributed (NCCL on "cuda", else gloo) if nobody has and the mesh needs
    it. Raises ValueError if the number of processes is not that of the mesh's devices.
    """
    found = world_size()
    if found != mesh.num_devices:
        raise ValueError(_mismatch(mesh, found))
    if mesh.num_devices == 1 or dist.is_initialized():
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(local_device(mesh.num_devices))
    store = store_file()
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(
            backend, store=dist.FileStore(str(store), found), rank=rank(), world_size=found
        )


def leave() -> None:
    """Close torch.distributed, if it is open: ranks that just exit make others complain."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _mismatch(mesh: Mesh, found: int) -> str:
    wanted = mesh.num_devices
    processes = "1 process runs" if found == 1 else f"{found} processes run"
    devices = "1 device" if wanted == 1 else f"{wanted} devices"
    program = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "SCRIPT.py"
    return (
        f"the mesh {mesh} has {devices}, but {processes}; start one process per device with "
        f"'torchrun --nproc-per-node {wanted} {program}', or use a mesh of {found}."
    )
