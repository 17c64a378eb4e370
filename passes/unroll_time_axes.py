"""unroll-time-axes: write the sub-batches of a local program out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from xdsl.context import Context
from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardweave.ir import dist
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.literals import to_attribute
from shardweave.ir.mesh import Axis, Mesh
from shardweave.ir.program import Program, Slot
from shardweave.ir.sharding import DimSharding, Placement, Sharding, block_of, ordered
from shardweave.ir.types import shape_of, tensor_type_of, with_shape
from shardweave.passes.flow import annotated
from shardweave.passes.time_collectives import TimeOps

Coordinate = tuple[int, ...]
Copies = dict[Coordinate, SSAValue]
"""The value of each sub-batch; a value that does not vary stands once, under ()."""


@dataclass(frozen=True)
class UnrollTimeAxesPass(ModulePass):
    """Clone each op once per coordinate on the time axes; what does not vary stays single.

    A collective over a time axis becomes local arithmetic: an all-reduce a sum of the copies,
    an all-gather a concatenation, a slice a slice. Copies carry `copy`, their coordinate.

    Requires: a local program. Ensures: the mesh has no time axis; numerics unchanged; the
    copies of an op stand side by side, in the order of their coordinates. Linear in the
    resulting ops.
    """

    name = "unroll-time-axes"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        mesh = program.mesh
        if mesh is None or all(axis.kind == "space" for axis in mesh.axes):
            return
        if not program.is_local:
            raise ValueError("the program is global; run insert-collectives first.")
        _Unroller(program, mesh).run()


class _Unroller:
    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program = program
        self.mesh = mesh
        self.times: tuple[Axis, ...] = tuple(a for a in mesh.axes if a.kind == "time")
        self.names = [axis.name for axis in self.times]
        self.block = Block()
        self.copies: dict[SSAValue, Copies] = {}
        self.ops = TimeOps(self.block)

    def coordinates(self) -> Iterator[Coordinate]:
        return product(*(range(axis.size) for axis in self.times))

    def run(self) -> None:
        arguments = self.program.arguments
        shardings = {slot.value: self.program.sharding_of_slot(slot) for slot in arguments}
        entries: dict[int, Attribute | None] = {}
        for index, slot in enumerate(arguments):
            sharding = shardings[slot.value]
            self._argument(slot, sharding)
            space = without_axes(sharding, self.names)
            shape = sharding.global_shape(shape_of(slot.value))
            entries[index] = ShardingAttr.of(space, shape)
        for op in self.program.ops:
            self._op(op)
        results, result_entries = self._results()
        self.block.add_op(func.ReturnOp(*results))
        self.program.set_argument_attributes("dist.sharding", entries)
        self.program.set_result_attributes("dist.sharding", result_entries)
        self._replace_body(results)

    # Arguments and results

    def _argument(self, slot: Slot, sharding: Sharding) -> None:
        """The whole device's part comes in; each sub-batch is cut out of it."""
        placements = self._time_placements(sharding)
        shape = list(shape_of(slot.value))
        for dim, placement in placements:
            shape[dim] *= placement.size
        type_ = with_shape(tensor_type_of(slot.value), shape)
        argument = self.block.insert_arg(type_, len(self.block.args))
        argument.name_hint = slot.value.name_hint
        if not placements:
            self.copies[slot.value] = {(): argument}
            return
        found: Copies = {}
        for coordinate in self.coordinates():
            value: SSAValue = argument
            left = sharding
            for dim, placement in placements:
                index = coordinate[self.names.index(placement.axis)]
                block = self._outer_block(left, dim, placement)
                value = self.ops.deal(value, dim, placement.size, block, index)
            found[coordinate] = value
            self._mark(value, coordinate)
        self.copies[slot.value] = found

    def _outer_block(self, sharding: Sharding, dim: int, placement: Placement) -> int:
        """Block of a time placement in the device's part, other time axes of the dim still whole
        if they are minor."""
        space = tuple(
            p for p in sharding.dims[dim] if p.axis not in self.names or p == placement
        )
        return block_of(space, placement)

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
            shape = sharding.global_shape(shape_of(slot.value))
            copies = self.copies[slot.value]
            for dim, placement in self._time_placements(sharding):
                copies = self._gathered(copies, placement.axis, dim, block_of(
                    sharding.dims[dim], placement))
            values.append(self._single(copies))
            entries[index] = ShardingAttr.of(without_axes(sharding, self.names), shape)
        return values, entries

    @staticmethod
    def _single(copies: Copies) -> SSAValue:
        """A value that no longer varies (all copies are one)."""
        return next(iter(copies.values()))

    # Ops

    def _op(self, op: Operation) -> None:
        self.ops.source = op
        if isinstance(op, dist.DistOp) and any(axis in self.names for axis in op.axes):
            self._over_time(op)
            return
        inputs = [self.copies[v] for v in op.operands]
        varying = any(len(copies) > 1 for copies in inputs)
        shardings = annotated(op, self.program)
        found: list[Copies] = [{} for _ in op.results]
        for coordinate in self.coordinates() if varying else [()]:
            operands = [copies.get(coordinate) or copies[()] for copies in inputs]
            clone = type(op).create(
                operands=operands,
                result_types=op.result_types,
                properties=op.properties,
                location=op.location,
            )
            self._finish(clone, coordinate, shardings, op)
            for copies, result in zip(found, clone.results, strict=True):
                copies[coordinate] = result
        for old, copies in zip(op.results, found, strict=True):
            self.copies[old] = copies

    def _finish(
        self,
        clone: Operation,
        coordinate: Coordinate,
        shardings: list[Sharding | None],
        op: Operation,
    ) -> None:
        entries: list[Attribute] = []
        for result, old, sharding in zip(clone.results, op.results, shardings, strict=True):
            result.name_hint = old.name_hint
            if sharding is not None:
                space = scaled_without(sharding, self.names)
                entries.append(ShardingAttr.of(space, space.global_shape(shape_of(old))))
        clone.properties = {k: v for k, v in clone.properties.items() if k != "sharding"}
        if len(entries) == len(clone.results):
            clone.properties["sharding"] = builtin.ArrayAttr(entries)
        if coordinate:
            clone.properties["copy"] = to_attribute(list(coordinate))
        self.block.add_op(clone)

    def _mark(self, value: SSAValue, coordinate: Coordinate) -> None:
        owner = value.owner
        if isinstance(owner, Operation):
            owner.properties["copy"] = to_attribute(list(coordinate))

    # Collectives over time axes

    def _over_time(self, op: dist.DistOp) -> None:
        time_axes = [axis for axis in op.axes if axis in self.names]
        space_axes = [axis for axis in op.axes if axis not in self.names]
        if isinstance(op, dist.ShardIndexOp):
            self._index(op)
            return
        found: list[Copies] = []
        for operand in op.operands:
            copies = self._full(self.copies[operand])
            for axis in time_axes:
                copies = self._along(op, copies, axis)
            found.append(copies)
        if space_axes:
            found = self._rest(op, found, space_axes)
        for result, copies in zip(op.results, found, strict=True):
            self.copies[result] = copies

    def _full(self, copies: Copies) -> Copies:
        """One entry per coordinate."""
        if len(copies) > 1 or () not in copies:
            return copies
        return {coordinate: copies[()] for coordinate in self.coordinates()}

    def _along(self, op: dist.DistOp, copies: Copies, axis: str) -> Copies:
        """One collective over one time axis, as local ops."""
        if isinstance(op, dist.AllReduceOp):
            return self._merged(copies, axis, lambda parts: self.ops.reduce(parts, op.reduction))
        dim, block = op.integer("dim"), op.integer("block")
        if isinstance(op, dist.AllGatherOp):
            return self._gathered(copies, axis, dim, block)
        if isinstance(op, dist.ReduceScatterOp):
            copies = self._merged(copies, axis, lambda parts: self.ops.reduce(parts, "sum"))
        elif isinstance(op, dist.AllToAllOp):
            copies = self._gathered(
                copies, axis, op.integer("from_dim"), op.integer("from_block")
            )
        size = self.mesh.size(axis)
        position = self.names.index(axis)
        return {
            coordinate: self.ops.deal(value, dim, size, block, coordinate[position])
            for coordinate, value in copies.items()
        }

    def _gathered(self, copies: Copies, axis: str, dim: int, block: int) -> Copies:
        return self._merged(copies, axis, lambda parts: self.ops.undeal(parts, dim, block))

    def _merged(self, copies: Copies, axis: str, merge: object) -> Copies:
        """Merge the copies along one axis; the others stay apart. One result for all."""
        assert callable(merge)
        position = self.names.index(axis)
        groups: dict[Coordinate, list[tuple[int, SSAValue]]] = {}
        for coordinate, value in copies.items():
            rest = coordinate[:position] + coordinate[position + 1 :]
            groups.setdefault(rest, []).append((coordinate[position], value))
        merged = {
            rest: merge([value for _, value in sorted(group, key=lambda pair: pair[0])])
            for rest, group in groups.items()
        }
        if len(merged) == 1:
            return {(): next(iter(merged.values()))}
        return {
            c: merged[c[:position] + c[position + 1 :]] for c in copies
        }

    def _rest(
        self, op: dist.DistOp, found: list[Copies], axes: list[str]
    ) -> list[Copies]:
        """The part of a collective over space axes, after its part over time axes."""
        properties = {k: v for k, v in op.properties.items() if k != "sharding"}
        properties["axes"] = to_attribute(axes)
        results: list[Copies] = [{} for _ in found]
        for coordinate in found[0]:
            clone = type(op).create(
                operands=[copies[coordinate] for copies in found],
                result_types=op.result_types,
                properties=properties,
                location=op.location,
            )
            self._finish(clone, coordinate, annotated(op, self.program), op)
            for copies, result in zip(results, clone.results, strict=True):
                copies[coordinate] = result
        return results

    def _index(self, op: dist.ShardIndexOp) -> None:
        """The position on time axes is a constant of the copy."""
        found: Copies = {}
        for coordinate in self.coordinates():
            at = dict(zip(self.names, coordinate, strict=True))
            found[coordinate] = self.ops.shard_index(
                [(axis, self.mesh.size(axis), at.get(axis)) for axis in op.axes]
            )
            self._mark(found[coordinate], coordinate)
        self.copies[op.results[0]] = found

    def _replace_body(self, results: list[SSAValue]) -> None:
        function = self.program.function
        region = function.body
        old = region.blocks[0]
        for op in reversed(list(old.ops)):
            op.detach()
            op.erase(safe_erase=False)
        region.detach_block(old)
        region.add_block(self.block)
        function.function_type = builtin.FunctionType.from_lists(
            [a.type for a in self.block.args], [r.type for r in results]
        )
        self.program.set_mesh(Mesh(self.mesh.space_axes))


def without_axes(sharding: Sharding, names: list[str]) -> Sharding:
    """The sharding with some axes gathered: their placements dropped, others unmoved."""
    dims = tuple(tuple(p for p in dim if p.axis not in names) for dim in sharding.dims)
    unreduced = tuple(a for a in sharding.unreduced if a not in names)
    return Sharding(dims, unreduced, sharding.reduction if unreduced else "sum")


def scaled_without(sharding: Sharding, names: list[str]) -> Sharding:
    """The sharding of one copy: its global value is smaller by the dropped axes' digits."""
    dims: list[DimSharding] = []
    for dim in sharding.dims:
        kept: list[Placement] = []
        for placement in dim:
            if placement.axis in names:
                continue
            minor = 1
            for other in dim:
                if other.axis in names and other.stride < placement.stride:
                    minor *= other.size
            kept.append(Placement(placement.axis, placement.size, placement.stride // minor))
        dims.append(ordered(kept))
    unreduced = tuple(a for a in sharding.unreduced if a not in names)
    return Sharding(tuple(dims), unreduced, sharding.reduction if unreduced else "sum")
