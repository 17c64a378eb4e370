"""Registry of the backends by name: their constructors, and the passes for their programs.

It imports nothing slow, since the command line lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardweave.backends.step.backend import Backend, Compiler
    from shardweave.ir.program.program import Program

MakeBackend = Callable[..., "Backend"]
"""Takes a program, the device of this rank and, by name, `cuda_graph` and `reduce_dtype`."""


@dataclass(frozen=True)
class BackendKind:
    """A backend that `sw.compile(backend=)` knows.

    make: constructor of the backend. has_processes: whether each device of the mesh is a process of
    torch.distributed; else one process runs all devices. passes: passes that group ops into the
    regions that the backend compiles; they run last, unless the program has regions already.
    """

    make: MakeBackend
    has_processes: bool = True
    passes: str = ""


def _reference(program: Program, device: torch.device, **options: object) -> Backend:
    from shardweave.backends.reference.reference import VirtualBackend

    return VirtualBackend()


def _distributed(compiler: Compiler | None = None) -> MakeBackend:
    """Return a constructor of the distributed backend, whose fused regions `compiler` compiles."""

    def make(program: Program, device: torch.device, **options: Any) -> Backend:
        from shardweave.backends.distributed.distributed import distributed_backend

        return distributed_backend(program, device, compiler=compiler, **options)

    return make


BACKENDS: dict[str, BackendKind] = {
    "distributed": BackendKind(_distributed()),
    "reference": BackendKind(_reference, has_processes=False),
    "triton": BackendKind(_distributed("triton"), passes="preset:kernels"),
    "inductor": BackendKind(_distributed("inductor"), passes="fuse-blocks"),
}


def register_backend(
    name: str, make: MakeBackend, *, has_processes: bool = True, passes: str = ""
) -> None:
    """Register a backend under a name for `sw.compile(backend=)`.

    make: takes a program, the device of this rank and, by name, `cuda_graph` and `reduce_dtype`;
    returns a `Backend`. has_processes, passes: as in `BackendKind`. The same backend may be
    registered again. Raises ValueError if another backend has the name.
    """
    if name in BACKENDS and BACKENDS[name].make is not make:
        raise ValueError(
            f"a backend '{name}' is registered already; give {make} a name of its own."
        )
    BACKENDS[name] = BackendKind(make, has_processes, passes)
