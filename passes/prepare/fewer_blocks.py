"""A step without most of its equal blocks, from which planners derive the costs of deep models.

A model of 96 equal layers has as many distinct blocks as one of four. This removes blocks in the
middle and connects their neighbours: forward, the last block reads the output of the block before
the gap; backward, the block before the gap reads the gradient that the last block made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from xdsl.dialects import builtin
from xdsl.ir import Operation, OpResult, SSAValue

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.program.blocks import BLOCKS, blocks_of
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import without_gc

Half = tuple[str, bool]
"""A block's name, and whether its forward ops (True) or its other ops are meant."""


@dataclass(eq=False)
class _Halves:
    """Ops of each half of each block in order, and each op's half and index in it."""

    ops: defaultdict[Half, list[Operation]] = field(
        default_factory=lambda: defaultdict[Half, list[Operation]](list)
    )
    place: dict[Operation, tuple[Half, int]] = field(
        default_factory=dict[Operation, tuple[Half, int]]
    )

    @staticmethod
    def of(program: Program) -> _Halves:
        halves, blocks = _Halves(), blocks_of(program)
        half: Half | None = None
        paths = [name.split(".") for name in blocks.names]
        around = {".".join(path[:end]) for path in paths for end in range(len(path))}
        for op in program.ops:
            name, is_forward = blocks.of_op(op), phase_of(op) == "forward"
            if name is not None:
                half = name, is_forward
            elif layer_of(op) not in around or half is None or half[1] != is_forward:
                half = None
            # Gradients of a residual stream are added up by the module around, after a block's.
            if half is not None:
                halves.place[op] = half, len(halves.ops[half])
                halves.ops[half].append(op)
        return halves

    def body(self, name: str) -> tuple[object, ...]:
        """A key that is equal for blocks whose ops have the same sequence of names and types."""
        return tuple(
            (op.name, is_forward, *(value.type for value in (*op.operands, *op.results)))
            for is_forward in (True, False)
            for op in self.ops.get((name, is_forward), ())
        )


def equal_blocks(program: Program) -> tuple[str, ...]:
    """Names of all blocks, if there are four or more and all but the first and last are equal."""
    names = blocks_of(program).names
    if len(names) < 4:
        return ()
    halves = _Halves.of(program)
    inner = names[1:-1]
    first = halves.body(inner[0])
    return names if all(halves.body(name) == first for name in inner[1:]) else ()


def with_fewer_blocks(program: Program, count: int) -> Program | None:
    """Copy a global step with only `count` of its equal blocks: the first ones and the last.

    None if the blocks differ, are no more than `count`, or share more than their outputs, such as a
    parameter or a mask whose gradient sums over all blocks. The result is a step of the model with
    `count` layers, used to compute costs and never run. Takes time linear in the ops. Raises
    ValueError for a count below 3.
    """
    if count < 3:
        raise ValueError(
            f"cannot keep {count} blocks; keep at least 3: the first, one in the middle, the last."
        )
    names = equal_blocks(program)
    if len(names) <= count:
        return None
    with without_gc():
        target = program.clone()
        return target if _take_out(target, names, count) else None


def _take_out(program: Program, names: Sequence[str], count: int) -> bool:
    """Remove the blocks from index `count - 1` on, except the last; returns whether it could."""
    halves = _Halves.of(program)
    gone = frozenset(names[count - 1 : -1])
    bridge = _Bridge(halves, names[count - 2], names[-2], gone)
    for op in program.ops:
        half = halves.place.get(op)
        if half is not None and half[0][0] in gone:
            continue
        for index, value in enumerate(op.operands):
            if not bridge.is_gone(value):
                continue
            instead = bridge.instead(op, index, value)
            if instead is None:
                return False
            op.operands[index] = instead
    if not _drop_slots(program, bridge):
        return False
    remove_dead_ops(program)
    if any(_is_in(halves, op, gone) for op in program.ops):
        return False
    stored = program.module.attributes.get(BLOCKS)
    if isinstance(stored, builtin.ArrayAttr):
        kept = [
            block
            for block in cast("builtin.ArrayAttr[builtin.StringAttr]", stored)
            if block.data not in gone
        ]
        program.module.attributes[BLOCKS] = builtin.ArrayAttr(kept)
    return True


def _is_in(halves: _Halves, op: Operation, names: frozenset[str]) -> bool:
    place = halves.place.get(op)
    return place is not None and place[0][0] in names


@dataclass(frozen=True)
class _Bridge:
    """A gap: the removed blocks `gone`, after block `before`. inner: the last of them."""

    halves: _Halves
    before: str
    inner: str
    gone: frozenset[str]

    def is_gone(self, value: SSAValue) -> bool:
        return isinstance(value, OpResult) and _is_in(self.halves, value.op, self.gone)

    def instead(self, op: Operation, index: int, value: SSAValue) -> SSAValue | None:
        """The value that operand `index` of `op` reads for a removed `value`; None if none."""
        result = cast(OpResult, value)
        (name, is_forward), place = self.halves.place[result.op]
        if is_forward:
            # What the last block in the gap hands on, the block before the gap hands on now.
            if name != self.inner:
                return None
            return self.halves.ops[self.before, True][place].results[result.index]
        # A backward pass reads what the like op of the gap's last block reads.
        own = self.halves.place.get(op)
        if own is None or own[0] != (self.before, False):
            return None
        like = self.halves.ops[self.inner, False][own[1]].operands[index]
        return None if self.is_gone(like) else like


def _drop_slots(program: Program, bridge: _Bridge) -> bool:
    """Remove results made in the gap, and its parameters; False if such a result is no gradient."""
    results, ret = program.results, program.return_op
    kept = [i for i, slot in enumerate(results) if not bridge.is_gone(slot.value)]
    if any(slot.kind != "grad" for slot in results if bridge.is_gone(slot.value)):
        return False
    ret.operands = [results[i].value for i in kept]
    program.function.res_attrs = _at(program.function.res_attrs, kept)
    remove_dead_ops(program)
    block = program.function.body.block
    # A parameter that no block reads any more; one that none has read is left to the planners.
    dropped = [
        slot.value.first_use is None and _names_gone(slot.name, bridge.gone)
        for slot in program.arguments
    ]
    stays = [index for index, is_dropped in enumerate(dropped) if not is_dropped]
    program.function.arg_attrs = _at(program.function.arg_attrs, stays)
    for argument, is_dropped in zip(tuple(block.args), dropped, strict=True):
        if is_dropped:
            block.erase_arg(argument)
    program.function.function_type = builtin.FunctionType.from_lists(
        list(block.arg_types), list(program.return_op.operand_types)
    )
    return True


def _names_gone(name: str, gone: frozenset[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in gone)


def _at(
    attributes: builtin.ArrayAttr[builtin.DictionaryAttr] | None, indices: Sequence[int]
) -> builtin.ArrayAttr[builtin.DictionaryAttr] | None:
    if attributes is None:
        return None
    data = list(attributes.data)
    return builtin.ArrayAttr([data[i] for i in indices])
