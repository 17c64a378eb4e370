"""Slips in the numbers and operands of ops, for tests of the proof and its benchmark."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import ArrayAttr, IntegerAttr
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import ANNOTATIONS, annotate, copy_of, layer_of
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.literals import to_attribute, to_python
from shardweave.ir.library.philox import RANDOM
from shardweave.ir.program.program import Program
from shardweave.tests.ir.proof.slips import (
    all_ops,
    aten_ops,
    in_flight,
    insert,
    is_passed,
    number_of,
    one,
    ops_of,
    slip,
)


def _is_float(value: SSAValue) -> bool:
    return "f" in str(value.type).split("x")[-1]


# Numbers


def _property(
    program: Program, rng: random.Random, is_fitting: Callable[[str, Attribute], bool]
) -> tuple[Operation, str] | None:
    """A property of some op that is no annotation and does not say of what the op reads."""
    left_out = (*ANNOTATIONS, "at", "operand_structure", "output_mask", "axes")
    places = [
        (op, name)
        for op in all_ops(program)
        for name, value in op.properties.items()
        if name not in left_out and is_fitting(name, value)
    ]
    return one(rng, places)


@slip
def number_is_another(program: Program, rng: random.Random) -> bool:
    """A dim, a start, a block, a factor, a bound of a mask, the number of a random draw."""
    place = _property(program, rng, lambda _, value: type(to_python(value)) in (int, float))
    if place is None:
        return False
    op, name = place
    value = number_of(op, name)
    assert value is not None
    scaled = value * rng.choice((0.5, 2.0)) or 1.0
    op.properties[name] = to_attribute(scaled if isinstance(value, float) else value + 1)
    return True


@slip
def list_of_numbers_is_another(program: Program, rng: random.Random) -> bool:
    """The dims of a sum or a permutation."""

    def is_list(_: str, value: Attribute) -> bool:
        items = value.data if isinstance(value, ArrayAttr) else ()
        return len(items) > 1 and all(isinstance(item, IntegerAttr) for item in items)

    place = _property(program, rng, is_list)
    if place is None:
        return False
    op, name = place
    value = to_python(op.properties[name])
    assert isinstance(value, list)
    op.properties[name] = to_attribute([*value[1:], value[0]])
    return True


@slip
def slice_starts_elsewhere(program: Program, rng: random.Random) -> bool:
    op = one(rng, ops_of(program, "aten.slice.Tensor"))
    if op is None:
        return False
    start = number_of(op, "start") or 0
    op.properties["start"] = to_attribute(start - 1 if start else 1)
    return True


MASKS = ("aten.ge.Scalar", "aten.lt.Scalar", "aten.tril", "aten.triu", "aten.arange.start_step")
"""The ops that say where a mask begins or ends, and by which property."""


@slip
def mask_is_off_by_one(program: Program, rng: random.Random) -> bool:
    op = one(rng, ops_of(program, *MASKS))
    if op is None:
        return False
    name = {"aten.tril": "diagonal", "aten.triu": "diagonal", MASKS[-1]: "start"}.get(op.name)
    name = name or "other"
    value = number_of(op, name) or 0
    op.properties[name] = to_attribute(value + rng.choice((-1, 1)))
    return True


@slip
def position_of_a_rank_is_another(program: Program, rng: random.Random) -> bool:
    """What a rank's number is multiplied by, or which rank it is taken for."""
    indices = ops_of(program, dist.ShardIndexOp)
    users = [use.operation for op in indices for use in op.results[0].uses]
    op = one(rng, [op for op in users if number_of(op, "other") is not None])
    if op is None:
        return False
    value = number_of(op, "other")
    assert value is not None
    op.properties["other"] = to_attribute(value + rng.choice((-1, 1)))
    return True


@slip
def random_key_is_another(program: Program, rng: random.Random) -> bool:
    op = one(rng, ops_of(program, RANDOM))
    if op is None:
        return False
    draw = number_of(op, "draw")
    assert draw is not None
    op.properties["draw"] = to_attribute(draw + 1)
    return True


@slip
def mean_is_over_another_count(program: Program, rng: random.Random) -> bool:
    """What a sum is divided by, or multiplied with, is twice as much."""
    factors = [
        op
        for op in ops_of(program, "aten.mul.Scalar", "aten.div.Scalar")
        if _is_float(op.results[0])
    ]
    op = one(rng, [*factors, *ops_of(program, "aten.div.Tensor")])
    if op is None:
        return False
    if op.name != "aten.div.Tensor":
        op.properties["other"] = to_attribute(2.0 * float(number_of(op, "other") or 0.5))
        return True
    count = op.operands[1]
    new = create("aten.mul.Scalar", [count], [count.type], {"other": 2.0})
    annotate(new, op)
    new.results[0].name_hint = "slip"
    block = op.parent_block()
    assert block is not None
    block.insert_op_before(new, op)
    op.operands[1] = new.results[0]
    return True


@slip
def value_is_scaled(program: Program, rng: random.Random) -> bool:
    ops = aten_ops(program)
    op = one(rng, [op for op in ops if op.results and _is_float(op.results[0])])
    if op is None:
        return False
    result = op.results[0]
    insert(create("aten.mul.Scalar", [result], [result.type], {"other": 0.5}), op, result)
    return True


# Operands


@slip
def term_of_a_sum_is_lost(program: Program, rng: random.Random) -> bool:
    op = one(rng, ops_of(program, "aten.add.Tensor"))
    return op is not None and is_passed(op, 0, rng.randrange(2))


@slip
def gradient_of_one_sub_batch_is_lost(program: Program, rng: random.Random) -> bool:
    """Or the row of a batch: an addition of two sub-batches' terms gives one of them."""
    sums = [
        op
        for op in ops_of(program, "aten.add.Tensor")
        if copy_of(op) is None
        and len({copy_of(v.owner) for v in op.operands if isinstance(v.owner, Operation)}) == 2
    ]
    op = one(rng, sums)
    return op is not None and is_passed(op, 0, rng.randrange(2))


@slip
def op_is_left_out(program: Program, rng: random.Random) -> bool:
    """Who reads an op reads its operand."""
    ops = [op for op in aten_ops(program) if op.operands and len(op.results) == 1]
    op = one(rng, [op for op in ops if op.operands[0].type == op.results[0].type])
    return op is not None and is_passed(op, 0)


@slip
def operands_are_swapped(program: Program, rng: random.Random) -> bool:
    ops = [op for op in aten_ops(program) if len(op.operands) > 1]
    op = one(rng, [op for op in ops if op.operands[0].type == op.operands[1].type])
    if op is None:
        return False
    op.operands = [op.operands[1], op.operands[0], *op.operands[2:]]
    return True


def another(
    program: Program, rng: random.Random, own: SSAValue, ops: Sequence[Operation]
) -> SSAValue | None:
    """An argument, or a result of some ops, of a value's type, that is not in flight."""
    moving = in_flight(list(program.ops))
    values = [*program.function.body.block.args, *(result for op in ops for result in op.results)]
    return one(rng, [v for v in values if v.type == own.type and v != own and v not in moving])


@slip
def value_of_equal_type_is_read(program: Program, rng: random.Random) -> bool:
    """That of another layer, sub-batch, pass or weight."""
    ops = list(program.ops)
    op = one(rng, [op for op in ops if op.operands and not isinstance(op, dist.WaitOp)])
    if op is None:
        return False
    index = rng.randrange(len(op.operands))
    before = ops[: ops.index(op)]
    other = another(program, rng, op.operands[index], before)
    if other is None:
        return False
    op.operands[index] = other
    return True


@slip
def sub_batch_is_another(program: Program, rng: random.Random) -> bool:
    """An op reads what its twin of another sub-batch reads."""
    ops = list(program.ops)
    places = {op: index for index, op in enumerate(ops)}
    copies = [op for op in ops if copy_of(op) is not None and op.operands]
    op = one(rng, copies)
    if op is None:
        return False
    index = rng.randrange(len(op.operands))
    for twin in copies:
        is_twin = (twin.name, layer_of(twin)) == (op.name, layer_of(op))
        if not is_twin or copy_of(twin) == copy_of(op) or len(twin.operands) != len(op.operands):
            continue
        value, own = twin.operands[index], op.operands[index]
        owner = value.owner
        is_there = isinstance(owner, Block) or places[owner] < places[op]
        if value != own and value.type == own.type and is_there:
            op.operands[index] = value
            return True
    return False


@slip
def result_is_stale(program: Program, rng: random.Random) -> bool:
    """A result is another value of its type: an old buffer, another gradient, one not reduced."""
    last, ops = program.return_op, list(program.ops)
    if not last.operands:
        return False
    index = rng.randrange(len(last.operands))
    other = another(program, rng, last.operands[index], ops)
    if other is None:
        return False
    last.operands[index] = other
    return True


@slip
def buffer_is_stale(program: Program, rng: random.Random) -> bool:
    """A buffer that the step changes is returned, or read, as it was before."""
    old = {slot.name: slot.value for slot in program.arguments if slot.kind == "buffer"}
    new = [slot for slot in program.results if slot.kind == "buffer" and slot.name in old]
    slot = one(rng, [s for s in new if s.value.type == old[s.name].type])
    if slot is None:
        return False
    slot.value.replace_all_uses_with(old[slot.name])
    return True
