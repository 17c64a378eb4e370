"""Unrolling of time axes: each op of a local program is cloned once for each sub-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TypeVar

from xdsl.dialects import func
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import set_copy, set_sharding_attrs
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import remade
from shardweave.ir.dialects.literals import Literal
from shardweave.ir.dialects.types import shape_of, tensor_type_of, with_shape
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import (
    DimSharding,
    Placement,
    Sharding,
    block_of,
    held_size,
    of_length,
    ordered,
)
from shardweave.ir.program.program import Program, Slot, shardings_of
from shardweave.passes.memory.chunk_loss import CHUNKS, chunk_by_chunk
from shardweave.passes.notes import note
from shardweave.passes.partition.time_collectives import (
    CollectiveStep,
    TimeOps,
    effect_of,
    steps_of,
)
from shardweave.passes.program_pass import PassOnProgram

Coordinate = tuple[int, ...]
Copies = dict[Coordinate, SSAValue]
"""A value's copy for each sub-batch; sub-batches between which it is equal share one SSA value."""

_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


def unroll_time_axes(program: Program, keep: str = "") -> None:
    """Clone each op of a local program once per coordinate on the time axes.

    keep: a time axis that is not unrolled, such as a pipeline's micro-batches. Raises ValueError
    for a global program that has time axes. Takes time linear in the resulting ops.
    """
    mesh = program.mesh
    if mesh is None or not set(mesh.time_names) - {keep}:
        return
    if not program.is_local:
        raise ValueError("the program is global; run insert-collectives first.")
    _Unroller(program, mesh, keep).run()


def _as_space(mesh: Mesh, name: str) -> Mesh:
    """The mesh, in which the axis `name`, if it has one, is a space axis."""
    return Mesh(replace(axis, kind="space") if axis.name == name else axis for axis in mesh.axes)


class _Unroller:
    def __init__(self, program: Program, mesh: Mesh, keep: str = "") -> None:
        self.program = program
        self.mesh = _as_space(mesh, keep)
        self.left = Mesh(axis for axis in mesh.axes if axis.kind != "time" or axis.name == keep)
        self.names = self.mesh.time_names
        self.coordinates = list(product(*(range(mesh.size(name)) for name in self.names)))
        self.block = Block()
        self.copies: dict[SSAValue, Copies] = {}
        self.ops = TimeOps(self.block)

    def run(self) -> None:
        entries: dict[int, Attribute | None] = {}
        for index, slot in enumerate(self.program.arguments):
            sharding = self.program.sharding_of_slot(slot)
            self._argument(slot, sharding)
            entries[index] = self._space_attr(slot, sharding)
        for op in self.program.ops:
            self._op(op)
        results, result_entries = self._results()
        if CHUNKS in self.names:
            ops = list(self.block.ops)
            for op in chunk_by_chunk(ops, self.names.index(CHUNKS)):
                op.detach()
                self.block.add_op(op)
        self.block.add_op(func.ReturnOp(*results))
        self.program.set_argument_attributes("dist.sharding", entries)
        self.program.set_result_attributes("dist.sharding", result_entries)
        self.program.replace_body(self.block)
        self.program.set_mesh(self.left)

    def _once(
        self, keys: Mapping[Coordinate, _Key], make: Callable[[_Key], _Made]
    ) -> dict[Coordinate, _Made]:
        """Call `make` once for each distinct key; returns its result by sub-batch. If keys differ,
        `copy` of the ops that `make` adds is the first sub-batch with the key."""
        made: dict[_Key, _Made] = {}
        varies = len(set(keys.values())) > 1
        for coordinate, key in keys.items():
            if key not in made:
                self.ops.copy = coordinate if varies else ()
                made[key] = make(key)
        self.ops.copy = ()
        return {coordinate: made[key] for coordinate, key in keys.items()}

    # Arguments and results

    def _argument(self, slot: Slot, sharding: Sharding) -> None:
        """Add an argument for the device's shards of all sub-batches; slice each one from it."""
        placements = self._time_placements(sharding)
        shape = list(shape_of(slot.value))
        for dim, placement in placements:
            shape[dim] *= placement.size
        type_ = with_shape(tensor_type_of(slot.value), shape)
        argument = self.block.insert_arg(type_, len(self.block.args))
        argument.name_hint = slot.value.name_hint
        copies: Copies = dict.fromkeys(self.coordinates, argument)
        for dim, placement in placements:
            # In the device's part the minor ones among the dim's other time axes are still whole.
            others = [name for name in self.names if name != placement.axis]
            block = block_of(sharding.without(others).dims[dim], placement)
            copies = self._cut(copies, placement.axis, dim, block)
        if placements:
            space = scaled_without(sharding, self.names)
            entry = ShardingAttr.of(space, space.global_shape(shape_of(slot.value)))
            for value in copies.values():
                if isinstance(value.owner, Operation):
                    set_sharding_attrs(value.owner, [entry])
        self.copies[slot.value] = copies

    def _time_placements(self, sharding: Sharding) -> list[tuple[int, Placement]]:
        return [
            (dim, placement)
            for dim, placements in enumerate(sharding.dims)
            for placement in placements
            if placement.axis in self.names
        ]

    def _results(self) -> tuple[list[SSAValue], dict[int, Attribute | None]]:
        values: list[SSAValue] = []
        entries: dict[int, Attribute | None] = {}
        for index, slot in enumerate(self.program.results):
            sharding = self.program.sharding_of_slot(slot)
            copies = self.copies[slot.value]
            for dim, placement in self._time_placements(sharding):
                block = block_of(sharding.dims[dim], placement)
                copies = self._gathered(copies, placement.axis, dim, block)
            value = copies[self.coordinates[0]]
            values.append(value)
            entry = entries[index] = self._space_attr(slot, sharding)
            if self._time_placements(sharding) and isinstance(value.owner, Operation):
                set_sharding_attrs(value.owner, [entry])  # what was put together says it, too
        return values, entries

    def _space_attr(self, slot: Slot, sharding: Sharding) -> ShardingAttr:
        shape = sharding.global_shape(shape_of(slot.value))
        return ShardingAttr.of(sharding.without(self.names), shape)

    # Ops

    def _op(self, op: Operation) -> None:
        self.ops.source = op
        if isinstance(op, dist.DistOp) and any(axis in self.names for axis in op.axes):
            self._over_time(op)
            return
        shardings = shardings_of(op, self.program)

        def clone(operands: tuple[SSAValue, ...]) -> Operation:
            copy = op.clone(dict(zip(op.operands, operands, strict=True)))
            self._finish(copy, shardings, op)
            return copy

        self._define(op, self._once(self._operands(op), clone))

    def _operands(self, op: Operation) -> dict[Coordinate, tuple[SSAValue, ...]]:
        inputs = [self.copies[value] for value in op.operands]
        return {c: tuple(copies[c] for copies in inputs) for c in self.coordinates}

    def _define(self, op: Operation, clones: Mapping[Coordinate, Operation]) -> None:
        for index, result in enumerate(op.results):
            self.copies[result] = {c: clone.results[index] for c, clone in clones.items()}

    def _finish(
        self, clone: Operation, shardings: Sequence[Sharding | None], op: Operation
    ) -> None:
        entries: list[ShardingAttr] = []
        for result, old, sharding in zip(clone.results, op.results, shardings, strict=True):
            result.name_hint = old.name_hint
            if sharding is not None:
                space = scaled_without(sharding, self.names)
                entries.append(ShardingAttr.of(space, space.global_shape(shape_of(old))))
        set_sharding_attrs(clone, entries if len(entries) == len(clone.results) else None)
        if self.ops.copy:
            set_copy(clone, self.ops.copy)
        self.block.add_op(clone)

    # Collectives over time axes

    def _over_time(self, op: dist.DistOp) -> None:
        if isinstance(op, dist.ShardIndexOp):
            self._index(op)
            return
        over_time, over_space = steps_of(op, self.mesh)
        values = [self.copies[value] for value in op.operands]
        for step in over_time:
            values = [self._along(op, copies, step) for copies in values]
        for step in over_space:
            values = self._rest(op, values, step, is_last=step is over_space[-1])
        for result, copies in zip(op.results, values, strict=True):
            self.copies[result] = copies

    def _along(self, op: dist.DistOp, copies: Copies, step: CollectiveStep) -> Copies:
        (axis,) = step.axes
        effect = effect_of(op)
        if (reduction := effect.reduces) is not None:
            copies = self._merged(copies, axis, lambda parts: self.ops.reduce(parts, reduction))
        if effect.gathers is not None:
            dim, block = effect.gathers
            copies = self._gathered(copies, axis, dim, block * step.gathered)
        if effect.shards is not None:
            dim, block = effect.shards
            copies = self._cut(copies, axis, dim, block * step.cut)
        return copies

    def _cut(self, copies: Copies, axis: str, dim: int, block: int) -> Copies:
        """Slice each sub-batch's blocks out of a value that is not sharded over `axis`."""
        size, position = self.mesh.size(axis), self.names.index(axis)
        keys = {c: (value, c[position]) for c, value in copies.items()}
        return self._once(keys, lambda key: self.ops.take_blocks(key[0], dim, size, block, key[1]))

    def _gathered(self, copies: Copies, axis: str, dim: int, block: int) -> Copies:
        return self._merged(copies, axis, lambda parts: self.ops.merge_blocks(parts, dim, block))

    def _merged(
        self, copies: Copies, axis: str, merge: Callable[[tuple[SSAValue, ...]], SSAValue]
    ) -> Copies:
        """Merge copies that differ only in their coordinate on `axis`, and share the result."""
        size, position = self.mesh.size(axis), self.names.index(axis)
        keys = {
            c: tuple(copies[*c[:position], index, *c[position + 1 :]] for index in range(size))
            for c in copies
        }
        return self._once(keys, merge)

    def _rest(
        self, op: dist.DistOp, values: list[Copies], step: CollectiveStep, *, is_last: bool
    ) -> list[Copies]:
        """Add a collective's step over space axes, which follows its steps over time axes."""
        changed: dict[str, Literal] = {"axes": list(step.axes)}
        if isinstance(op, dist.AlongDimOp):
            longer = step.gathered if op.effect.shards is None else step.cut
            changed["block"] = op.block * longer
        if isinstance(op, dist.AllToAllOp):
            changed["from_block"] = op.from_block * step.gathered
        ranks = self.mesh.sizes(step.axes)
        shardings = shardings_of(op, self.program) if is_last else [None] * len(op.results)

        def clone(operands: tuple[SSAValue, ...]) -> Operation:
            types = [
                with_shape(tensor_type_of(value), op.expected_shape(shape_of(value), ranks))
                for value in operands
            ]
            copy = remade(op, operands, types, **changed)
            self._finish(copy, shardings, op)
            return copy

        keys = {c: tuple(copies[c] for copies in values) for c in self.coordinates}
        clones = self._once(keys, clone)
        return [{c: clones[c].results[i] for c in clones} for i in range(len(values))]

    def _index(self, op: dist.ShardIndexOp) -> None:
        """Lower a shard index; each sub-batch's coordinates on time axes add a constant to it."""
        weights = {axis: self.mesh.sizes(op.axes[i + 1 :]) for i, axis in enumerate(op.axes)}
        position = self.ops.position([(a, w) for a, w in weights.items() if a not in self.names])
        constants = {
            c: sum(weights.get(name, 0) * index for name, index in zip(self.names, c, strict=True))
            for c in self.coordinates
        }
        self.copies[op.results[0]] = self._once(constants, lambda c: self.ops.plus(position, c))


def scaled_without(sharding: Sharding, names: Collection[str]) -> Sharding:
    """The sharding of a sub-batch's copy: drops the time axes `names`, which divides strides."""
    dims: list[DimSharding] = []
    first = dict.fromkeys(names, 0)
    for dim in sharding.dims:
        dropped = tuple(p for p in dim if p.axis in names)
        kept = ordered(
            replace(p, stride=p.stride // prod(d.size for d in dropped if d.stride < p.stride))
            for p in dim
            if p not in dropped
        )
        # The first copy has the most of a dim that is cut unevenly.
        length = max((p.length for p in dim), default=0)
        dims.append(of_length(kept, held_size(dropped, length, first)) if length else kept)
    return replace(sharding.reduced(names), dims=tuple(dims))


@dataclass(frozen=True)
class UnrollTimeAxesPass(PassOnProgram):
    """Clone each op once per coordinate on the time axes; ops that do not depend on them stay
    single.

    A collective over a time axis becomes local arithmetic: an all-reduce a sum of the copies, an
    all-gather a concatenation, a slice a slice. Copies carry `copy`, their coordinate.

    Requires: a local program. Ensures: the mesh has no time axis; numerics unchanged; the copies of
    an op stand side by side, in the order of their coordinates. Takes time linear in the resulting
    ops. `keep` names a time axis that is not unrolled: a pipeline's micro-batches, which
    `cut-stages` schedules.
    """

    name = "unroll-time-axes"
    keep: str = ""

    def run(self, program: Program) -> None:
        if program.mesh is None or not set(program.mesh.time_names) - {self.keep}:
            note(
                "the mesh has no time axis; run split-batch before propagate-shardings, or leave "
                "the pass out."
            )
        unroll_time_axes(program, self.keep)
