"""Cuts along the height of images: of inputs; propagation shards values up to the loss alike."""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.ir import SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import contiguous
from shardweave.ir.program.program import Program
from shardweave.planners.megatron.sequence_cut import with_dim

CONVOLUTION = "aten.convolution"


def cut_images(
    program: Program, mesh: Mesh, axis: str, given: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Shardings of inputs: `given`, and the height over `axis` of those that convolutions read (the
    length, of lines), and of inputs with the same spatial dims, such as masks. Also returns notes.

    A height that does not divide stays whole, with a note. Deep in a model, a map may be too short
    for its rows to be divided: it is gathered there.
    """
    inputs, notes = dict(given), list[str]()
    if axis not in mesh.names or mesh.size(axis) == 1:
        return inputs, notes
    size, planes = mesh.size(axis), _planes(program)
    if not planes:
        notes.append(
            f"axis '{axis}' of the mesh is idle: no images were found, for no convolution reads an "
            "input"
        )
    for plane in [plane for plane in planes if plane[-2:][0] % size]:
        notes.append(
            f"images of {list(plane)} stay whole: their height is no multiple of {axis}={size}"
        )
    for slot in program.arguments:
        shape = shape_of(slot.value)
        for plane in planes:
            dim = len(shape) - min(len(plane), 2)
            if slot.kind == "input" and shape[1:][-len(plane) :] == plane and not shape[dim] % size:
                cut = contiguous([axis], shape[dim], mesh)
                inputs[slot.name] = with_dim(inputs.get(slot.name), shape, mesh, dim, cut)
    return inputs, notes


def _planes(program: Program) -> list[tuple[int, ...]]:
    """The spatial dims of the inputs of forward convolutions that are inputs of the step, or
    computed from these without a change of their spatial dims."""
    seen = {slot.value for slot in program.arguments if slot.kind == "input"}
    planes: dict[tuple[int, ...], None] = {}
    for op in program.ops:
        if not isinstance(op, AtenOp) or phase_of(op) != "forward":
            continue
        if op.name == CONVOLUTION and op.operands[0] in seen:
            planes[shape_of(op.operands[0])[2:]] = None
        elif any(_keeps_plane(value, op.results[0]) for value in op.operands if value in seen):
            seen.add(op.results[0])
    return list(planes)


def _keeps_plane(value: SSAValue, result: SSAValue) -> bool:
    before, after = shape_of(value), shape_of(result)
    return len(before) == len(after) > 2 and before[2:] == after[2:]
