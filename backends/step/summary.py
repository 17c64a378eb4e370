"""A summary of a step in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.backends.step.bound import BoundProgram
from shardweave.ir.inspect.stats import stats
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.staged import ops_of_parts
from shardweave.planners.cost.quantity import bytes_text


def summary_of(
    mesh: Mesh,
    parameters: Iterable[Tensor],
    programs: Sequence[tuple[str, BoundProgram]],
    notes: Sequence[str],
) -> str:
    """Describe the mesh, the bytes of parameters, each program's collectives, and the notes."""
    tensors = list(parameters)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    here = sum(_local(tensor).nbytes for tensor in tensors)
    lines = [
        f"mesh {mesh}" if mesh.axes else "one device",
        f"{len(tensors)} parameters of {bytes_text(whole)}, {bytes_text(here)} in this process",
    ]
    for what, bound in programs:
        collectives = stats(bound.program).collectives
        sent = [f"{c.count} {c.kind} over {', '.join(c.axes)} ({c.phase})" for c in collectives]
        num_ops = sum(1 for _ in ops_of_parts(bound.program))
        lines.append(f"{what}: {num_ops} ops; {'; '.join(sent) or 'no collectives'}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
