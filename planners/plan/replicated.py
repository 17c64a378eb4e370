"""The planner that shards only the batch, and notes on empty shards of inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, contiguous, held_size
from shardweave.ir.program.program import Program
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import argument_shardings
from shardweave.planners.plan.zero import DATA_AXIS, REPLICA_AXIS


def plan_replicated(program: Program, mesh: Mesh, *, data: str = DATA_AXIS) -> Plan:
    """Replicate every parameter; shard inputs along dim 0 over the `data` axis, and over `replica`
    where the mesh has it.

    This is plain data parallelism, the baseline of comparisons; nothing is optimized.
    Inputs whose first dim is too short are replicated, and a note says so.
    """
    inputs, notes = batch_shardings(program, mesh, REPLICA_AXIS, data)
    notes += idle_data(inputs, mesh, REPLICA_AXIS, data)
    return Plan(
        mesh={axis.name: axis.size for axis in mesh.axes},
        inputs=inputs,
        planner="replicated",
        notes=tuple(notes),
    )


def batch_shardings(program: Program, mesh: Mesh, *axes: str) -> tuple[dict[str, str], list[str]]:
    """Return shardings of dim 0 of every input over the mesh's `axes`, by name, evenly or not.

    Also returns notes on inputs whose dim 0 is too short, which have no entry."""
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
        if not can_be_cut(shape[0], list(sizes), mesh):
            notes.append(
                f"input '{slot.name}' stays whole: its first dim {shape[0]} is too short for "
                f"{divisor}"
            )
            continue
        inputs[slot.name] = f"[{{{cut}}}" + ", {}" * (len(shape) - 1) + "]"
    return inputs, notes


def can_be_cut(size: int, axes: Sequence[str], mesh: Mesh) -> bool:
    """True if sharding a dim of `size` over `axes`, evenly or not, gives every rank a part."""
    try:
        contiguous(axes, size, mesh)
    except ValueError:
        return False
    return True


def idle_data(inputs: Mapping[str, str], mesh: Mesh, *axes: str) -> list[str]:
    """Return a note for each mesh axis in `axes` that is idle because `inputs`, the plan's sharded
    inputs, is empty: its ranks all compute the same."""
    return [
        f"axis '{axis}' of the mesh is idle: no input can be sharded over "
        f"{axis}={mesh.size(axis)}, and its ranks all compute the same"
        for axis in axes
        if not inputs and axis in mesh.names and mesh.size(axis) > 1
    ]


def notes_on_empty_parts(plan: Plan, program: Program) -> list[str]:
    """Return a note for each sharding of an input dim that leaves some devices without data, such
    as a batch of 8 over data=500. Takes time linear in the devices of the sharding's axes."""
    mesh = Mesh(**plan.mesh).within_stage
    notes: dict[tuple[int, DimSharding], str] = {}
    for index, given in argument_shardings(program, "input", plan.inputs, mesh).items():
        slot = program.arguments[index]
        shape = shape_of(slot.value)
        for dim, (cut, size) in enumerate(zip(given.on(shape, mesh).dims, shape, strict=True)):
            empty = sum(not held_size(cut, size, place) for place in _places(cut))
            if empty and (size, cut) not in notes:
                axes = ",".join(f"{placement.axis}={placement.size}" for placement in cut)
                count = math.prod(placement.size for placement in cut)
                notes[size, cut] = (
                    f"{axes} leaves {empty} of {count} parts idle: dim {dim} of input "
                    f"'{slot.name}' has size {size}; give "
                    f"{'a larger batch' if dim == 0 else 'longer inputs'}, or fewer devices there"
                )
    return list(notes.values())


def _places(cut: DimSharding) -> Iterator[dict[str, int]]:
    """Yield the coordinates of all devices on the axes that shard a dim, by axis name."""
    axes = [placement.axis for placement in cut]
    for numbers in itertools.product(*(range(placement.size) for placement in cut)):
        yield dict(zip(axes, numbers, strict=True))
