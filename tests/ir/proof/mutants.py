"""Local programs with one slip in them, of many kinds, for tests of the proof."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import ArrayAttr, IntegerAttr
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir import dist
from shardweave.ir.annotations import ANNOTATIONS, annotate, describe
from shardweave.ir.aten import AtenOp, create
from shardweave.ir.facts import facts_of
from shardweave.ir.literals import to_attribute, to_python
from shardweave.ir.program import Program
from shardweave.ir.staged import parts_of

Slip = Callable[[Program, list[Operation], random.Random], Operation | list[Operation] | None]
"""Changes a program in one place; returns the op (or the ops that read another value by it), or
None where there is no such place."""

SLIPS: dict[str, Slip] = {}


@dataclass(frozen=True)
class Mutant:
    """A program with a slip. near: the ops that it is in, and those that read their results, as
    messages and views bring them."""

    kind: str
    program: Program
    near: frozenset[Operation]

    def is_named_in(self, message: str) -> bool:
        """Whether a message names one of these ops, or the result that is another value."""
        names = [describe(op).split(" at ")[0] for op in self.near]
        return self.kind == "result_is_stale" or any(name in message for name in names)


def slip(function: Slip) -> Slip:
    SLIPS[function.__name__] = function
    return function


def mutant(program: Program, seed: int) -> Mutant | None:
    """The program with a slip that the seed chooses; None if it has no place for that kind."""
    rng = random.Random(seed)
    copy = program.clone()
    part = rng.choice([part for part in parts_of(copy) if any(True for _ in part.ops)])
    kind = rng.choice(sorted(SLIPS))
    ops = SLIPS[kind](part, list(part.ops), rng)
    if not ops:
        return None
    return Mutant(kind, copy, frozenset(_near(ops if isinstance(ops, list) else [ops])))


def _near(ops: list[Operation]) -> Iterator[Operation]:
    for op in ops:
        yield op
        for use in [use for result in op.results for use in result.uses]:
            user = use.operation
            moves = isinstance(user, dist.DistOp) or facts_of(user).is_rearrangement
            yield from _near([user]) if moves else [user]


def _chosen(ops: list[Operation], rng: random.Random, *kinds: type | str) -> Operation | None:
    fitting = [
        op for op in ops if any(op.name == k if isinstance(k, str) else isinstance(op, k)
                                for k in kinds)
    ]  # fmt: skip
    return rng.choice(fitting) if fitting else None


def _bypassed(result: SSAValue, by: SSAValue) -> list[Operation]:
    """Let the users of a value read another one; returns them."""
    users = [use.operation for use in result.uses]
    result.replace_all_uses_with(by)
    return users


@slip
def collective_is_dropped(
    program: Program, ops: list[Operation], rng: random.Random
) -> list[Operation] | None:
    op = _chosen(ops, rng, *dist.COLLECTIVES, dist.SliceOp)
    if op is None:
        return None
    index = rng.randrange(len(op.results))
    if op.results[index].type != op.operands[index].type:
        return None
    return _bypassed(op.results[index], op.operands[index])


@slip
def collective_is_doubled(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    op = _chosen(ops, rng, dist.AllReduceOp)
    if op is None:
        return None
    index = rng.randrange(len(op.results))
    result = op.results[index]
    again = type(op).create(
        operands=[result], result_types=[result.type], properties={**op.properties}
    )
    again.properties.pop("sharding", None)
    block = op.parent_block()
    assert block is not None
    block.insert_op_after(again, op)
    result.replace_uses_with_if(again.results[0], lambda use: use.operation is not again)
    return again


@slip
def collective_is_over_other_axes(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    op = _chosen(ops, rng, *dist.COLLECTIVES, *dist.STARTED, dist.SliceOp, dist.ShardIndexOp)
    if op is None:
        return None
    names = [axis.name for axis in program.needed_mesh().axes]
    others = [list(n) for n in ([a] for a in names) if n != to_python(op.properties["axes"])]
    if len(names) > 1:
        others += [names, names[::-1]]
    others = [axes for axes in others if axes != to_python(op.properties["axes"])]
    if not others:
        return None
    op.properties["axes"] = to_attribute(rng.choice(others))
    return op


def _property(
    ops: list[Operation], rng: random.Random, is_fitting: Callable[[str, Attribute], bool]
) -> tuple[Operation, str] | None:
    """A property of some op that is no annotation and does not say of what the op reads."""
    left_out = (*ANNOTATIONS, "at", "operand_structure", "output_mask", "axes")
    places = [
        (op, name)
        for op in ops
        for name, value in op.properties.items()
        if name not in left_out and is_fitting(name, value)
    ]
    return rng.choice(places) if places else None


@slip
def number_is_another(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    """A dim, a start, a block, a factor, a bound of a mask, the number of a random draw."""
    place = _property(ops, rng, lambda _, value: type(to_python(value)) in (int, float))
    if place is None:
        return None
    op, name = place
    value = to_python(op.properties[name])
    assert isinstance(value, int | float)
    scaled = value * rng.choice((0.5, 2.0)) or 1.0
    changed = scaled if isinstance(value, float) else value + 1
    op.properties[name] = to_attribute(changed)
    return op


@slip
def list_of_numbers_is_another(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    """The dims of a sum or a permutation."""

    def is_list(_: str, value: Attribute) -> bool:
        items = value.data if isinstance(value, ArrayAttr) else ()
        return len(items) > 1 and all(isinstance(item, IntegerAttr) for item in items)

    place = _property(ops, rng, is_list)
    if place is None:
        return None
    op, name = place
    value = to_python(op.properties[name])
    assert isinstance(value, list)
    op.properties[name] = to_attribute([*value[1:], value[0]])
    return op


@slip
def slice_starts_elsewhere(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    op = _chosen(ops, rng, "aten.slice.Tensor")
    if op is None:
        return None
    start = to_python(op.properties["start"]) if "start" in op.properties else 0
    assert isinstance(start, int)
    op.properties["start"] = to_attribute(start - 1 if start else 1)
    return op


@slip
def term_of_a_sum_is_lost(
    program: Program, ops: list[Operation], rng: random.Random
) -> list[Operation] | None:
    op = _chosen(ops, rng, "aten.add.Tensor")
    if op is None:
        return None
    kept = op.operands[rng.randrange(2)]
    return _bypassed(op.results[0], kept) if kept.type == op.results[0].type else None


@slip
def value_is_scaled(program: Program, ops: list[Operation], rng: random.Random) -> Operation | None:
    """A mean over the wrong count."""
    fitting = [
        op for op in ops if isinstance(op, AtenOp) and "f" in str(op.results[0].type).split("x")[-1]
    ]
    if not fitting:
        return None
    op = rng.choice(fitting)
    (result, *_) = op.results
    new = create("aten.mul.Scalar", [result], [result.type], {"other": 0.5})
    annotate(new, op)
    block = op.parent_block()
    assert block is not None
    block.insert_op_after(new, op)
    result.replace_uses_with_if(new.results[0], lambda use: use.operation is not new)
    return new


@slip
def operands_are_swapped(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    fitting = [
        op for op in ops if len(op.operands) > 1 and op.operands[0].type == op.operands[1].type
    ]
    if not fitting:
        return None
    op = rng.choice(fitting)
    op.operands = [op.operands[1], op.operands[0], *op.operands[2:]]
    return op


@slip
def value_of_equal_type_is_read(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    """That of another layer, sub-batch, pass or weight."""
    fitting = [op for op in ops if op.operands]
    if not fitting:
        return None
    op = rng.choice(fitting)
    index = rng.randrange(len(op.operands))
    earlier: list[SSAValue] = list(program.function.body.block.args)
    for other in ops:
        if other is op:
            break
        earlier += [] if type(other) in dist.STARTED else other.results
    same = [v for v in earlier if v.type == op.operands[index].type and v != op.operands[index]]
    if not same:
        return None
    op.operands[index] = rng.choice(same)
    return op


@slip
def sub_batch_is_another(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    """An op reads what its twin of another sub-batch reads."""
    copies = [op for op in ops if "copy" in op.properties and op.operands]
    if not copies:
        return None
    op = rng.choice(copies)
    twins = [
        other
        for other in copies
        if other.properties["copy"] != op.properties["copy"]
        and other.name == op.name
        and other.properties.get("layer") == op.properties.get("layer")
        and list(other.operand_types) == list(op.operand_types)
        and list(other.operands) != list(op.operands)
    ]
    places = {op: index for index, op in enumerate(ops)}
    index = rng.randrange(len(op.operands))
    for twin in twins:
        owner = twin.operands[index].owner
        if twin.operands[index] != op.operands[index] and (
            isinstance(owner, Block) or places.get(owner, len(ops)) < places[op]
        ):
            op.operands[index] = twin.operands[index]
            return op
    return None


@slip
def result_is_stale(program: Program, ops: list[Operation], rng: random.Random) -> Operation | None:
    """A result is another value of its type: an old buffer, another gradient, one not reduced."""
    last = program.return_op
    if not last.operands:
        return None
    index = rng.randrange(len(last.operands))
    values = [*program.function.body.block.args, *(r for op in ops for r in op.results)]
    same = [v for v in values if v.type == last.operands[index].type and v != last.operands[index]]
    in_flight = {r for op in ops if type(op) in dist.STARTED for r in op.results}
    same = [value for value in same if value not in in_flight]
    if not same:
        return None
    last.operands[index] = rng.choice(same)
    return last


@slip
def op_is_moved_before_what_it_reads(
    program: Program, ops: list[Operation], rng: random.Random
) -> Operation | None:
    fitting = [op for op in ops if any(isinstance(v.owner, Operation) for v in op.operands)]
    if not fitting:
        return None
    op = rng.choice(fitting)
    owner = next(v.owner for v in op.operands if isinstance(v.owner, Operation))
    assert isinstance(owner, Operation)
    block = owner.parent_block()
    assert block is not None
    op.detach()
    block.insert_op_before(op, owner)
    return op
