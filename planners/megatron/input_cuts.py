"""Sharding of inputs along sequences, and along the height of images. Propagation shards all values
up to the loss alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.ir import SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, contiguous
from shardweave.ir.ops.records.attention import FLASH
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.rules.attention import POSITIONS
from shardweave.planners.plan.plan_names import sharding_text
from shardweave.planners.structure.linear_maps import input_embeddings

SEQUENCE = 1
"""The dim of positions of an input, and of an embedding's output."""


@dataclass(frozen=True)
class SequenceCut:
    """Placements of a mesh axis on the sequence dims of a program, by length of the sequence."""

    mesh: Mesh = field(default_factory=Mesh)
    placements: Mapping[int, Placement] = field(default_factory=dict[int, Placement])
    notes: tuple[str, ...] = ()

    def inputs(self, program: Program, given: Mapping[str, str]) -> dict[str, str]:
        """Shardings of inputs: `given`, and the sequence's for inputs with a sequence dim."""
        inputs = dict(given)
        for slot in program.arguments:
            shape = shape_of(slot.value)
            if (
                slot.kind == "input"
                and len(shape) > SEQUENCE
                and shape[SEQUENCE] in self.placements
            ):
                cut = (self.placements[shape[SEQUENCE]],)
                inputs[slot.name] = with_dim(given.get(slot.name), shape, self.mesh, SEQUENCE, cut)
        return inputs


def with_dim(
    text: str | None, shape: tuple[int, ...], mesh: Mesh, dim: int, placements: DimSharding
) -> str:
    """A sharding's text with other placements of a dim; None stands for a replicated value's."""
    sharding = Sharding.replicated(len(shape))
    if text is not None:
        sharding = ShardingAttr.parse_text(text).on(shape, mesh)
    return sharding_text(sharding.with_dim(dim, placements).dims, shape)


def sequence_cut(program: Program, mesh: Mesh, axis: str, parts: int = 1) -> SequenceCut:
    """Shard the sequences of a program's embeddings and fused attention over `axis`.

    Causal attention gets stripes, position p on device p % n, so that all devices have the same
    work up to one row (Brandon et al. 2023, Striped Attention). So does attention that merges
    several parts of the keys, as every device must hold a piece of each part. Other sequences get
    contiguous shards. A length that does not divide stays replicated, with a note.

    Raises ValueError for fewer than one part.
    """
    if parts < 1:
        raise ValueError(f"attention_parts={parts}, expected a whole number of at least 1.")
    if axis not in mesh.names or mesh.size(axis) == 1:
        return SequenceCut(notes=_notes_on_unused(axis, parts))
    size = mesh.size(axis)
    lengths, is_causal = _sequences(program)
    stripes = is_causal or parts > 1
    placements: dict[int, Placement] = {}
    notes: list[str] = []
    for length in lengths:
        if length % (size * parts):
            by = f"{axis}={size}" + (f" in {parts} parts of attention" if parts > 1 else "")
            notes.append(f"sequences of {length} stay whole: they do not divide by {by}")
        else:
            placements[length] = Placement(axis, size, 1 if stripes else length // size)
    if not lengths:
        notes.append(
            f"axis '{axis}' of the mesh is idle: no sequence was found, for no embedding is looked "
            "up by an input, and there is no fused attention"
        )
    return SequenceCut(mesh, placements, tuple(notes))


def _notes_on_unused(axis: str, parts: int) -> tuple[str, ...]:
    if parts == 1:
        return ()
    return (
        f"attention_parts={parts} has no effect: no axis shards sequences; give the mesh an axis "
        f"'{axis}' of size 2 or more, or leave it out",
    )


def _sequences(program: Program) -> tuple[list[int], bool]:
    """The lengths of a program's sequences, and whether attention along them is causal."""
    lengths: dict[int, None] = {}
    for op, _ in input_embeddings(program):
        shape = shape_of(op.results[0])
        if len(shape) == 3:
            lengths[shape[SEQUENCE]] = None
    attentions = [
        op
        for op in program.ops
        if isinstance(op, AtenOp) and op.name == FLASH and phase_of(op) == "forward"
    ]
    lengths |= {shape_of(op.operands[0])[POSITIONS]: None for op in attentions}
    return list(lengths), any(op.value("is_causal") for op in attentions)


# Images

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
