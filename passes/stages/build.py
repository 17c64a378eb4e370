"""Builders of the IR functions of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Block, Operation, OpResult, Region, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    annotate,
    phase_of,
    set_phase,
    set_sharding_attrs,
    sharding_attrs_of,
)
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.types import (
    AnyTensor,
    shape_of,
    shape_of_type,
    tensor_type,
    tensor_type_of,
    with_shape,
)
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot, sharding_of
from shardweave.ir.program.staged import TOTALS, name_of
from shardweave.passes.partition.time_collectives import place_of_rank, weighted
from shardweave.passes.stages.members import Members

Attributes = dict[str, Attribute]

_ORDER = ("param", "buffer", "input", "tangent", "whole", "kept", *TOTALS)
"""Order of a function's arguments, by kind."""


class ValueSlots:
    """Names, shardings and slots for the values of a program that is split into stages."""

    def __init__(self, program: Program, axis: str | None) -> None:
        self.program = program
        self.axis = axis
        self.slots = {slot.value: slot for slot in program.arguments}
        self.results = {(slot.kind, slot.name): slot for slot in program.results}
        self.position = {op: index for index, op in enumerate(program.ops)}
        self._names: dict[tuple[SSAValue, bool], str] = {}
        self._taken: dict[str, int] = {}

    def name(self, value: SSAValue, kind: str = "") -> str:
        """A unique name for a value; if `kind` is a total over micro-batches, another one."""
        key = value, kind in TOTALS
        if key not in self._names:
            word = name = value.name_hint or "value"
            count = self._taken.get(word, 0)
            while name in self._taken:
                count += 1
                name = f"{word}_{count}"
            self._taken[word], self._taken[name] = count, 0
            self._names[key] = name
        return self._names[key]

    def sharding(self, value: SSAValue) -> Sharding:
        """The sharding of a value; replicated, if none is noted."""
        if isinstance(value, OpResult):
            attributes = sharding_attrs_of(value.op)
            given = attributes[value.index] if attributes else None
            return sharding_of(given, shape_of(value), self.program)
        return self.program.sharding_of_slot(self.slots[value])

    def summed(self, value: SSAValue, kind: str) -> tuple[AnyTensor, Attributes]:
        """The type and slot attributes of a value that is summed or joined over micro-batches."""
        sharding = self.sharding(value)
        type_ = tensor_type_of(value)
        if kind in ("part", "whole"):
            type_ = self.joined(value, sharding)
        return type_, self._slot(kind, self.name(value, kind), self.without_axis(sharding), type_)

    def joined(self, value: SSAValue, sharding: Sharding) -> AnyTensor:
        """The type, on one device, of a value whose micro-batches are concatenated."""
        sizes = [prod(p.size for p in dim if p.axis == self.axis) for dim in sharding.dims]
        shape = [n * size for n, size in zip(shape_of(value), sizes, strict=True)]
        return with_shape(tensor_type_of(value), shape)

    def without_axis(self, sharding: Sharding) -> Sharding:
        return sharding if self.axis is None else sharding.without((self.axis,))

    def entry(self, kind: str, value: SSAValue) -> Attributes:
        """The slot attributes of a value of one micro-batch."""
        return self._slot(kind, self.name(value, kind), self.sharding(value), tensor_type_of(value))

    def _slot(self, kind: str, name: str, sharding: Sharding, type_: AnyTensor) -> Attributes:
        shape = sharding.global_shape(shape_of_type(type_))
        return {
            "dist.kind": builtin.StringAttr(kind),
            "dist.name": builtin.StringAttr(name),
            "dist.sharding": ShardingAttr.of(sharding, shape),
        }

    def whole_entry(self, slot: Slot) -> tuple[AnyTensor, Attributes]:
        """The type and attributes of an argument or result of the step, for all micro-batches."""
        sharding = self.program.sharding_of_slot(slot)
        type_ = self.joined(slot.value, sharding)
        left = self.without_axis(sharding)
        shape = left.global_shape(shape_of_type(type_))
        data = {**slot.attributes.data, "dist.sharding": ShardingAttr.of(left, shape)}
        return type_, data


def function_of(
    name: str, block: Block, arguments: Sequence[Attributes], results: Sequence[Attributes]
) -> func.FuncOp:
    """Build a function from a block that ends in a return."""
    last = block.last_op
    assert last is not None
    type_ = builtin.FunctionType.from_lists(list(block.arg_types), list(last.operand_types))
    return func.FuncOp(
        name, type_, Region(block), arg_attrs=_entries(arguments), res_attrs=_entries(results)
    )


def _entries(slots: Sequence[Attributes]) -> builtin.ArrayAttr[builtin.DictionaryAttr] | None:
    """Attributes of arguments or results as an array; None if none, as xDSL's parser has it."""
    return builtin.ArrayAttr(builtin.DictionaryAttr(slot) for slot in slots) if slots else None


class FunctionBuilder:
    """Builds the IR of one function."""

    def __init__(self, members: Members, values: ValueSlots) -> None:
        self.members = members
        self.values = values
        self.block = Block()
        self.arguments: list[Attributes] = []
        self.local: dict[SSAValue, SSAValue] = {}
        self.number: SSAValue | None = None
        self.is_after = members.direction in ("share", "after")

    def build(self) -> func.FuncOp:
        members = self.members
        self._arguments()
        for value in members.given:
            self._send(value)
        for op in sorted(members.ops, key=self.values.position.__getitem__):
            self._receive(op.operands, op)
            self._op(op)
            for result in op.results:
                self._send(result)
        returned, results = self._results()
        self.block.add_op(func.ReturnOp(*returned))
        name = name_of(members.direction, members.stage)
        return function_of(name, self.block, self.arguments, results)

    # Arguments and results

    def _arguments(self) -> None:
        given = self.members.given
        for value in sorted(given, key=lambda value: _ORDER.index(given[value])):
            kind = given[value]
            if kind in TOTALS or (kind == "whole" and self.is_after):
                type_, entry = self.values.summed(value, kind)
            elif value in self.values.slots:
                slot = self.values.slots[value]
                type_, entry = tensor_type_of(value), dict(slot.attributes.data)
            else:
                type_, entry = tensor_type_of(value), self.values.entry(kind, value)
            self.local[value] = self._argument(type_, entry, value.name_hint)

    def _argument(self, type_: AnyTensor, entry: Attributes, name: str | None) -> SSAValue:
        argument = self.block.insert_arg(type_, len(self.block.args))
        argument.name_hint = name
        self.arguments.append(entry)
        return argument

    def _results(self) -> tuple[list[SSAValue], list[Attributes]]:
        members, values = self.members, self.values
        needed = [*(value for value, _ in members.left), *members.returned.values()]
        self._receive(needed, None)
        results = [self.local[value] for value in needed]
        entries = [values.entry(kind, value) for value, kind in members.left]
        entries += [values.whole_entry(values.results[key])[1] for key in members.returned]
        return results, entries

    # Messages

    def _receive(self, needed: Iterable[SSAValue], op: Operation | None) -> None:
        """Receive the values of `needed` that other stages send and are not received yet."""
        for value in needed:
            if value in self.local or value not in self.members.received:
                continue
            # After the micro-batches it is what all of them have.
            type_ = tensor_type_of(value)
            if self.is_after:
                type_ = self.values.joined(value, self.values.sharding(value))
            recv = dist.create_dist(
                dist.RecvOp,
                [],
                [type_],
                source=self.members.received[value],
                name=self.values.name(value),
            )
            self._annotate(recv, value, op)
            self.local[value] = recv.results[0]

    def _send(self, value: SSAValue) -> None:
        for stage in self.members.sent.get(value, ()):
            name = self.values.name(value)
            send = dist.create_dist(dist.SendOp, [self.local[value]], [], to=stage, name=name)
            if isinstance(value.owner, Operation):
                annotate(send, value.owner)
            self.block.add_op(send)

    def _annotate(self, recv: dist.RecvOp, value: SSAValue, reader: Operation | None) -> None:
        """Give a received value the sharding that its sender declares, if it declares one."""
        assert isinstance(value.owner, Operation)
        annotate(recv, value.owner)
        if reader is not None and phase_of(reader) != phase_of(value.owner):
            set_phase(recv, phase_of(reader))
        if sharding_attrs_of(value.owner) is not None:
            sharding = self.values.sharding(value)
            if self.is_after:
                sharding = self.values.without_axis(sharding)
            shape = sharding.global_shape(shape_of(recv.results[0]))
            set_sharding_attrs(recv, [ShardingAttr.of(sharding, shape)])
        recv.results[0].name_hint = value.name_hint
        self.block.add_op(recv)

    # Ops

    def _op(self, op: Operation) -> None:
        axis = self.values.axis
        if axis is not None and isinstance(op, dist.DistOp) and axis in op.axes:
            self._over_micro_batches(op, axis)
            return
        copy = op.clone(self.local)  # which adds its results to `local`
        if self.is_after:
            self._drop_axis(op, copy)
        self.block.add_op(copy)

    def _drop_axis(self, op: Operation, copy: Operation) -> None:
        """Drop the micro-batch axis from an op's shardings; the op runs after all of them."""
        if sharding_attrs_of(op) is None:
            return
        shardings = [self.values.without_axis(self.values.sharding(value)) for value in op.results]
        shapes = [s.global_shape(shape_of(v)) for s, v in zip(shardings, op.results, strict=True)]
        pairs = zip(shardings, shapes, strict=True)
        set_sharding_attrs(copy, [ShardingAttr.of(sharding, shape) for sharding, shape in pairs])

    def _over_micro_batches(self, op: dist.DistOp, axis: str) -> None:
        rest = [name for name in op.axes if name != axis]
        if isinstance(op, dist.ShardIndexOp):
            self.local[op.results[0]] = self._index(op, axis, rest)
        elif not rest:
            self.local[op.results[0]] = self.local[op.operands[0]]
        else:
            copy = remade(op, [self.local[op.operands[0]]], op.result_types, axes=rest)
            set_sharding_attrs(copy, sharding_attrs_of(op))
            Builder.at_end(self.block).insert(copy, op.results[0])
            self.local[op.results[0]] = copy.results[0]

    def _index(self, op: dist.ShardIndexOp, axis: str, rest: Sequence[str]) -> SSAValue:
        """Compute a shard index over the axis of micro-batches and the axes `rest`."""
        if self.number is None:
            entry: Attributes = {
                "dist.kind": builtin.StringAttr("micro_batch"),
                "dist.name": builtin.StringAttr(axis),
            }
            self.number = self._argument(tensor_type((), torch.int64), entry, axis)
        mesh = self.values.program.needed_mesh()
        weights = {name: mesh.sizes(op.axes[i + 1 :]) for i, name in enumerate(op.axes)}

        def add(new: Operation) -> SSAValue:
            return Builder.at_end(self.block, op).insert(new, "index").results[0]

        first = weighted(add, self.number, weights[axis])
        total = place_of_rank(add, [(name, weights[name]) for name in rest], first)
        assert total is not None
        return total
