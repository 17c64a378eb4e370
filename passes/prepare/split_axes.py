"""Splitting mesh axes into parts, where an op can be sharded over the parts but not the whole axis.

A dim of 8 sharded over an axis of 4 becomes dims 2 x 4 in a view. The axis is the product of two of
size 2: the first part shards the dim of 2, the second the dim of 4. Likewise two key heads may be
sharded over the first part, and the queries that share each over the second. Ranks keep their
numbers, and shardings that name the axis stand for both parts (`Mesh.parts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh, whole_axis
from shardweave.ir.mesh.placement import is_even
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.passes.partition.propagate_shardings import Propagation, propagated_forward
from shardweave.passes.program_pass import Analyses, PassWithAnalyses


@dataclass(frozen=True)
class SplitAxesPass(PassWithAnalyses):
    """Split an axis of the mesh, `tensor` of 4 into `tensor.0` and `tensor.1` of 2, if the factors
    of some op are sharded over its parts alone.

    Axes over which inputs are sharded stay whole, as ranks of one row share it; so do axes that
    shard an argument unevenly, since DTensors can be uneven over whole axes only. With `groups`, an
    axis is also split where query heads outnumber key heads, which are then sharded over the first
    part; without, each rank selects key heads. Parts save work, and may cost a message where the
    gradients of queries and keys add up.

    Requires: a global program with a mesh, before `propagate-shardings`. Ensures: numerics
    unchanged; ranks keep their numbers. Takes time linear in the ops.
    """

    name = "split-axes"
    groups: bool = False

    def rewrite(self, program: Program, analyses: Analyses) -> None:
        mesh = program.needed_mesh()
        check_not_propagated(program, self.name)
        kept = {axis for slot in program.arguments for axis in _whole_axes(slot, program)}
        open_axes = [a.name for a in mesh.space_axes if a.size > 3 and a.name not in kept]
        if not open_axes:
            return
        propagation = analyses.of(propagated_forward)
        kept = _read_whole(program, propagation)
        open_axes = [axis for axis in open_axes if axis not in kept]
        split = _split(mesh, open_axes, propagation, groups=self.groups)
        if split != mesh:
            program.set_mesh(split)
            analyses.forget()


def _whole_axes(slot: Slot, program: Program) -> frozenset[str]:
    """The axes that must not be split because an argument is sharded over them."""
    sharding = program.sharding_of_slot(slot)
    is_split = slot.kind != "input" and sharding.is_even(shape_of(slot.value))
    return frozenset() if is_split else sharding.axes


def _read_whole(program: Program, propagation: Propagation) -> set[str]:
    """The axes that arguments without an annotation may come to need unsplit: those over which an
    op reads an input, or any value unevenly."""
    free = propagation.free
    inputs = {s.value for s in program.arguments if s.kind == "input" and s.value in free}
    kept: set[str] = set()
    for op, assignment in propagation.assignments.items():
        for value, read in zip(op.operands, assignment.operands, strict=True):
            if value in inputs or not read.is_even(shape_of(value)):
                kept |= read.axes
    return kept


def _split(mesh: Mesh, axes: list[str], propagation: Propagation, *, groups: bool) -> Mesh:
    """The mesh, with each of `axes` split that some op can be sharded over only in part."""
    parts: dict[str, set[int]] = {axis: {1, mesh.size(axis)} for axis in axes}
    for op in propagation.ops:
        rule = propagation.flow.rule(op)
        for value, dims in zip(op.operands, rule.operands, strict=True):
            cuts = propagation.flow.sharding(value).dims
            for names, cut, size in zip(dims, cuts, shape_of(value), strict=True):
                for placement in cut if is_even(cut, size) else ():
                    part = rule.part_of_axis(names, placement, groups=groups)
                    if part is not None and placement.axis in parts:
                        parts[placement.axis].add(part)
    taken = {whole_axis(name) for name in mesh.names if name != whole_axis(name)}
    for axis, sizes in parts.items():
        if axis in taken or axis != whole_axis(axis):
            continue  # Names of parts stand for the axis alone, and parts have no parts.
        spans = sorted(sizes, reverse=True)
        if len(spans) > 2 and not any(outer % inner for outer, inner in pairwise(spans)):
            mesh = mesh.factored(axis, [outer // inner for outer, inner in pairwise(spans)])
    return mesh
