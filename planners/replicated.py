"""The planner that shards nothing but the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import contiguous
from shardweave.ir.program import Program
from shardweave.ir.types import shape_of
from shardweave.planners.plan import Plan


def plan_replicated(program: Program, mesh: Mesh, *, data: str = "data") -> Plan:
    """Every parameter whole on every device; inputs cut along dim 0 over the `data` axis.

    Objective: none; plain data parallelism, the baseline of every comparison. Exact.
    Inputs whose first dim is too short stay whole, and a note says so.
    """
    inputs, notes = batch_shardings(program, mesh, data)
    notes += idle_data(inputs, mesh, data)
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        inputs=inputs,
        planner="replicated",
        notes=tuple(notes),
    )


def batch_shardings(program: Program, mesh: Mesh, *axes: str) -> tuple[dict[str, str], list[str]]:
    """Dim 0 of every input over axes that the mesh has, evenly or not; and notes on those that are
    too short to be cut."""
    inputs: dict[str, str] = {}
    notes: list[str] = []
    sizes = {axis: mesh.size(axis) for axis in axes if axis in mesh.names}
    if not sizes:
        return inputs, notes
    cut = ", ".join(f'"{axis}"' for axis in sizes)
    divisor = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    for slot in program.arguments:
        shape = shape_of(slot.value)
        if slot.kind != "input" or not shape:
            continue
        if not _can_be_cut(shape[0], list(sizes), mesh):
            notes.append(
                f"input '{slot.name}' stays whole: its first dim {shape[0]} is too short for "
                f"{divisor}"
            )
            continue
        inputs[slot.name] = f"[{{{cut}}}" + ", {}" * (len(shape) - 1) + "]"
    return inputs, notes


def _can_be_cut(size: int, axes: Sequence[str], mesh: Mesh) -> bool:
    try:
        contiguous(axes, size, mesh)
    except ValueError:
        return False
    return True


def idle_data(inputs: Mapping[str, str], mesh: Mesh, data: str) -> list[str]:
    """A note if the data axis cuts no input, for planners that use it for inputs alone."""
    if inputs or data not in mesh.names or mesh.size(data) == 1:
        return []
    return [
        f"axis '{data}' of the mesh is idle: no input can be cut over {data}={mesh.size(data)}, "
        "and its ranks all compute the same"
    ]
