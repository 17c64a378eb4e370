"""The planner that shards nothing but the batch."""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.types import shape_of
from shardweave.planners.plan import Plan


def plan_replicated(program: Program, mesh: Mesh, *, data: str = "data") -> Plan:
    """Every parameter whole on every device; inputs cut along dim 0 over the `data` axis.

    Objective: none; plain data parallelism, the baseline of every comparison. Exact.
    Inputs whose first dim does not divide stay whole, and a note says so.
    """
    inputs, notes = batch_shardings(program, mesh, data)
    notes += idle_data(inputs, mesh, data)
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        inputs=inputs,
        planner="replicated",
        notes=tuple(notes),
    )


def batch_shardings(program: Program, mesh: Mesh, data: str) -> tuple[dict[str, str], list[str]]:
    """Dim 0 of every input over the data axis, where it divides; and notes on the others."""
    inputs: dict[str, str] = {}
    notes: list[str] = []
    if data not in mesh.names:
        return inputs, notes
    size = mesh.size(data)
    for slot in program.arguments:
        shape = shape_of(slot.value)
        if slot.kind != "input" or not shape:
            continue
        if shape[0] % size:
            notes.append(
                f"input '{slot.name}' stays whole: its first dim {shape[0]} does not divide by "
                f"{data}={size}"
            )
            continue
        rest = ", {}" * (len(shape) - 1)
        inputs[slot.name] = f'[{{"{data}"}}{rest}]'
    return inputs, notes


def idle_data(inputs: Mapping[str, str], mesh: Mesh, data: str) -> list[str]:
    """A note if the data axis cuts no input, for planners that use it for inputs alone."""
    if inputs or data not in mesh.names or mesh.size(data) == 1:
        return []
    return [
        f"axis '{data}' of the mesh is idle: no input can be cut over {data}={mesh.size(data)}, "
        "and its ranks all compute the same"
    ]
