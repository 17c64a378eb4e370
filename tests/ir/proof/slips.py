"""Slips of one kind each in the program of a rank, for tests of the proof and its benchmark."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import annotate
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.literals import to_attribute, to_python
from shardweave.ir.program.program import Program

Slip = Callable[[Program, random.Random], bool]
"""Changes a program in one place; whether there is such a place."""

SLIPS: dict[str, Slip] = {}
"""By kind: those within the program of a rank, or one function of a program of stages."""

_T = TypeVar("_T")


def slip(function: Slip) -> Slip:
    SLIPS[function.__name__] = function
    return function


# Finding and changing


def one(rng: random.Random, items: Sequence[_T]) -> _T | None:
    return rng.choice(items) if items else None


def all_ops(program: Program) -> Iterator[Operation]:
    """All ops, those of fused regions among them."""
    for op in program.ops:
        yield op
        if isinstance(op, FusedOp):
            yield from op.fused_ops


def ops_of(program: Program, *kinds: type | str) -> list[Operation]:
    """The ops of some names or classes; started collectives are not of the class that waits."""
    return [op for op in all_ops(program) if op.name in kinds or type(op) in kinds]


def aten_ops(program: Program) -> list[Operation]:
    return [op for op in all_ops(program) if isinstance(op, AtenOp)]


def number_of(op: Operation, name: str) -> int | float | None:
    """A property that is a number."""
    value = to_python(op.properties[name]) if name in op.properties else None
    return value if type(value) in (int, float) else None  # pyright: ignore[reportReturnType]


def insert(new: Operation, after: Operation, result: SSAValue) -> None:
    """Let all who read a result of an op read that of a new one, which stands behind it."""
    annotate(new, after)
    new.results[0].name_hint = "slip"
    block = after.parent_block()
    assert block is not None
    block.insert_op_after(new, after)
    result.replace_uses_with_if(new.results[0], lambda use: use.operation is not new)


def is_passed(op: Operation, index: int, by: int = 0) -> bool:
    """Let all who read a result of an op read its operand; whether these are of one type."""
    result, operand = op.results[index], op.operands[by]
    if result.type != operand.type or not any(True for _ in result.uses):
        return False
    result.replace_all_uses_with(operand)
    return True


def _moved_before_its_producer(op: Operation) -> bool:
    owners = [value.owner for value in op.operands]
    owner = next((owner for owner in owners if isinstance(owner, Operation)), None)
    block = op.parent_block()
    if owner is None or block is None:
        return False
    op.detach()
    block.insert_op_before(op, owner)
    return True


def in_flight(ops: Sequence[Operation]) -> set[SSAValue]:
    return {result for op in ops if isinstance(op, dist.StartedOp) for result in op.results}


# Collectives


@slip
def collective_is_dropped(program: Program, rng: random.Random) -> bool:
    op = one(rng, ops_of(program, *dist.STARTS, dist.SliceOp, dist.WaitOp))
    if op is None:
        return False
    index = rng.randrange(len(op.results))
    start = op.operands[0].owner
    if isinstance(op, dist.WaitOp) and isinstance(start, Operation):
        # The wait is that of a start, which goes as well.
        if op.results[index].type != start.operands[index].type:
            return False
        op.results[index].replace_all_uses_with(start.operands[index])
        return True
    return is_passed(op, index, index)


@slip
def collective_is_doubled(program: Program, rng: random.Random) -> bool:
    places = [
        (op, kind)
        for op in ops_of(program, dist.AllReduceOp, dist.WaitOp)
        if (kind := op if isinstance(op, dist.AllReduceOp) else op.operands[0].owner)
        and isinstance(kind, (dist.AllReduceOp, dist.STARTS[dist.AllReduceOp]))
    ]
    place = one(rng, places)
    if place is None:
        return False
    op, kind = place
    assert isinstance(kind, Operation)
    result = op.results[rng.randrange(len(op.results))]
    kept = {name: value for name, value in kind.properties.items() if name != "sharding"}
    new = dist.AllReduceOp.create(operands=[result], result_types=[result.type], properties=kept)
    insert(new, op, result)
    return True


@slip
def collective_is_over_other_axes(program: Program, rng: random.Random) -> bool:
    op = one(
        rng, ops_of(program, *dist.STARTS, *dist.STARTS.values(), dist.SliceOp, dist.ShardIndexOp)
    )
    if op is None:
        return False
    own = to_python(op.properties["axes"])
    names = [axis.name for axis in program.needed_mesh().axes]
    others = [[name] for name in names] + ([names, names[::-1]] if len(names) > 1 else [])
    axes = one(rng, [axes for axes in others if axes != own])
    if axes is None:
        return False
    op.properties["axes"] = to_attribute(axes)
    return True


@slip
def collective_is_moved_before_its_producer(program: Program, rng: random.Random) -> bool:
    op = one(rng, ops_of(program, *dist.STARTS, *dist.STARTS.values(), dist.WaitOp, dist.SliceOp))
    return op is not None and _moved_before_its_producer(op)


@slip
def collective_joins_in_another_order(program: Program, rng: random.Random) -> bool:
    """Blocks of another size, or along another dim."""
    names = ("dim", "block", "split_dim", "concat_dim")
    ops = ops_of(program, *dist.STARTS, *dist.STARTS.values(), dist.SliceOp)
    place = one(rng, [(op, n) for op in ops for n in names if number_of(op, n) is not None])
    if place is None:
        return False
    op, name = place
    value = number_of(op, name)
    assert value is not None
    changes = [value + 1, value - 1] if "dim" in name else [value * 2, value // 2]
    op.properties[name] = to_attribute(rng.choice([c for c in changes if c >= ("dim" not in name)]))
    return True


# Order


@slip
def op_is_moved_before_what_it_reads(program: Program, rng: random.Random) -> bool:
    op = one(rng, list(program.ops))
    return op is not None and _moved_before_its_producer(op)
