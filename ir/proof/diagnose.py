"""Messages about a result that was not proved: the first op at fault, and the likely cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import copy_of, describe
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Slot
from shardweave.ir.proof.model.expressions import Expressions
from shardweave.ir.proof.model.local_forms import FormsOf
from shardweave.ir.proof.ops import named
from shardweave.ir.proof.relations.held import Local, RankNumber, Relation, Row, Value
from shardweave.ir.proof.walk import Walk


def is_of_sum(value: Value, forms: FormsOf) -> bool:
    """True if a value may be a step of a sum of exponentials relative to a shard's own maximum.
    forms: looks up ops of the global program."""
    match value:
        case Local("aten.sub.Tensor", given, (Relation() as first, Relation() as second)):
            is_near = second.held.number in _maxima(first, forms)
            own = second if is_near else first
            is_away = first.held.number == second.held.number and not second.held.sharding.unreduced
            return not given and (is_near or is_away) and own.held.sharding.reduction == "max"
        case Local("aten.exp", _, (Local("aten.sub.Tensor") as distance,)):
            return is_of_sum(distance, forms)
        case Local("aten.sum.dim_IntList", along, (Local("aten.exp") as power,)):
            alike = [x for x in power.leaves if along in _maxima(x, forms).values()]
            return bool(alike) and is_of_sum(power, forms)
        case Local("aten.eq.Scalar", given, (Relation() as own,)):
            is_lowest = dict(given) == {"other": to_attribute(-math.inf)}
            return is_lowest and own.held.sharding.reduction == "max"
        case Local("aten.masked_fill.Scalar", given, (Local() as total, Local() as mask)):
            is_one = dict(given) == {"value": to_attribute(1.0)}
            return is_one and is_of_sum(total, forms) and is_of_sum(mask, forms)
        case _:
            return False


def _maxima(x: Relation, forms: FormsOf) -> dict[int, frozenset[tuple[str, Attribute]]]:
    """Map the number of each `amax` of a value in the global program to its arguments (dims)."""
    maxima = forms("aten.amax", (x.held.number,))
    return {form.results[0]: form.arguments for form in maxima}


def explain_mismatch(walk: Walk, slot: Slot, declared: Sharding, wanted: int) -> str:
    """Explain why a result is not the expression `wanted` in its declared sharding."""
    goal = f"{slot.kind} '{slot.name}' is to be that of {walk.table.describe(wanted)}"
    fault = _fault_of(walk, slot.value)
    if fault is not None:
        return f"{fault}. So {goal}, and is not shown to be."
    value, owner = walk.values[slot.value], slot.value.owner
    if not isinstance(value, Relation):
        return f"{goal}, but relates to nothing."
    maker = named(owner) if isinstance(owner, Operation) else _argument(walk, slot.value)
    if value.held.number != wanted:
        known = walk.table.describe(value.held.number)
        return f"{goal}, but {maker} gives that of {known}."
    attribute = ShardingAttr.of(declared, value.held.shape)
    return (
        f"{slot.kind} '{slot.name}': {maker} gives {shards_of(value)}, but it is declared "
        f"{attribute}; correct the collectives before the return, or dist.sharding."
    )


def _argument(walk: Walk, value: SSAValue) -> str:
    while value in walk.links:
        value = walk.links[value]
    owner = value.owner
    return "an argument" if isinstance(owner, Block) else f"an argument, of {named(owner)},"


def explain_given(walk: Walk, giver: str, reader: str, slot: Slot, given: SSAValue) -> str:
    """Explain why the value that stage function `giver` returns is not what `reader` takes."""
    problem = f"@{reader} reads {slot.kind} '{slot.name}'"
    fault = _fault_of(walk, given)
    if fault is not None:
        return f"{fault}. So {problem}, which relates to nothing that could be put together."
    said = _said(walk, given, walk.values[given])
    return f"{problem} as {slot.value.type}, but @{giver} gives {said} as {given.type}."


def explain_collective(walk: Walk, ops: Iterable[Operation]) -> str | None:
    """Explain the first wrong collective, even if no op reads its result; None if all are right."""
    for op in ops:
        if isinstance(op, dist.DistOp) and op.operands:
            values = [walk.values[value] for value in op.operands]
            made = [walk.values[result] for result in op.results]
            if any(
                isinstance(a, Relation) and isinstance(b, Local) and b not in walk.steps
                for a, b in zip(values, made, strict=False)
            ):
                return f"{named(op)}: {_problem_of_collective(op, values)}."
    return None


def _fault_of(walk: Walk, value: SSAValue) -> str | None:
    """Describe the first op at fault among those that compute a value; None if there is none."""
    op = first_at_fault(value, lambda v: _contains_local(walk.values[v], walk), walk.values, walk)
    return None if op is None else f"{named(op)}: {_problem_of(walk, op)}"


def shards_of(value: Relation) -> str:
    """Describe the sharding of a value in words."""
    held = value.held
    is_part = held.sharding.reduction == "lse"
    said = held.sharding.whole() if is_part else held.sharding
    text = str(ShardingAttr.of(said, held.shape)) if held.layout is None else "moved parts"
    text += " over some keys" if is_part else ""
    times = [f"{axis} {sorted(which)}" for axis, which in value.at]
    return text + (f" of {', '.join(times)}" if times else "")


def explain_same(table: Expressions, values: dict[SSAValue, int], slot: Slot, wanted: int) -> str:
    """Explain why a result differs from the other program's (both are local, or both global)."""
    goal = f"{slot.kind} '{slot.name}' is to be that of {table.describe(wanted)}"
    op = first_at_fault(slot.value, lambda value: values[value] >= table.num_read, values)
    if op is None:
        return f"{goal}, but is that of {table.describe(values[slot.value])}."
    read = [f"%{value.name_hint} = {table.describe(values[value])}" for value in op.operands]
    return (
        f"{named(op)}: the other program computes no such {op.name} of "
        f"{', '.join(read) or 'nothing'}. So {goal}, and is not shown to be."
    )


def first_at_fault(
    value: SSAValue,
    is_unrelated: Callable[[SSAValue], bool],
    order: Iterable[SSAValue],
    walk: Walk | None = None,
) -> Operation | None:
    """Find the first op, among those from which `value` is computed, that has related operands but
    an unrelated result; None if none does. order: the position of each value.

    An op on integers (offsets, masks) may have a relation only as a step of a local form, together
    with its other operands, so that an op on floating-point numbers is the likelier cause.
    """

    def is_at_fault(op: Operation) -> bool:
        own = not isinstance(op, FusedOp) and not any(map(is_unrelated, op.operands))
        return own and any(map(is_unrelated, op.results))

    faulty = [op for op in _makers_of([value], walk, is_unrelated) if is_at_fault(op)]
    likely = [op for op in faulty if dtype_of_value(op.results[0]).is_floating_point]
    return _first(likely or faulty, order)


def _makers_of(
    values: Iterable[SSAValue],
    walk: Walk | None,
    is_followed: Callable[[SSAValue], bool] = lambda value: True,
) -> list[Operation]:
    """Return the ops that values are computed from, including those in earlier stage functions."""
    stack, makers = list(values), dict[Operation, None]()
    links = {} if walk is None else walk.links
    while stack:
        value = stack.pop()
        if value in links:
            stack.append(links[value])
            continue
        owner = value.owner
        if isinstance(owner, Block) or owner in makers or not is_followed(value):
            continue
        makers[owner] = None
        stack += owner.operands
        if isinstance(owner, FusedOp):
            stack += owner.yielded
    return list(makers)


def _first(ops: Sequence[Operation], order: Iterable[SSAValue]) -> Operation | None:
    results: dict[SSAValue, Operation] = {op.results[0]: op for op in ops if op.results}
    return next((results[value] for value in order if value in results), None)


def _of_another_sub_batch(walk: Walk, op: Operation) -> Operation | None:
    """The first op feeding `op` with a result of another sub-batch than its `copy` attribute."""

    def is_other(maker: Operation) -> bool:
        part, copy = walk.values[maker.results[0]], copy_of(maker)
        if not isinstance(part, Relation) or not copy or not len(part.at) == len(copy) == 1:
            return False
        return part.at[0][1] != frozenset({copy[0]})

    others = [maker for maker in _makers_of(op.operands, walk) if is_other(maker)]
    return _first(others, walk.values)


def _contains_local(value: Value, walk: Walk) -> bool:
    if isinstance(value, Row):
        return any(_contains_local(piece, walk) for piece, _ in value.pieces)
    if isinstance(value, Local):
        return value not in walk.steps and not is_of_sum(value, walk.table.known)
    return isinstance(value, Relation) and value.held.number >= walk.table.num_read


def _problem_of(walk: Walk, op: Operation) -> str:
    """Describe what is wrong with an op, and the op that is likely the cause."""
    other = _of_another_sub_batch(walk, op)
    text = _likely_problem(walk, op)
    return text if other is None else f"{text}; {named(other)} gives that of another sub-batch"


def _likely_problem(walk: Walk, op: Operation) -> str:
    values = [walk.values[value] for value in op.operands]
    refusal = walk.refusals.get(op)
    if refusal is not None:
        return refusal.text(op) + (f" {op.name}" if refusal.problem.endswith("before") else "")
    if isinstance(op, dist.DistOp):
        return _problem_of_collective(op, values)
    read = [
        f"%{operand.name_hint} = {_said(walk, operand, value)}"
        for operand, value in zip(op.operands, values, strict=True)
    ]
    return f"the model computes no such {op.name} of {', '.join(read) or 'nothing'}"


def _problem_of_collective(op: dist.DistOp, values: list[Value]) -> str:
    axes = ", ".join(op.axes)
    for operand, value in zip(op.operands, values, strict=True):
        name = f"%{operand.name_hint}"
        if isinstance(value, Relation):
            shards = shards_of(value)
            if op.effect is not None and op.effect.reduces is not None:
                return f"{name} is to be reduced over {axes}, but is {shards}"
            return f"{name} cannot be moved so over {axes}: it is {shards} {shape_of(operand)}"
    return f"it has no operand that relates to the model, over {axes}"


def relation_of(walk: Walk, value: SSAValue) -> str:
    """Describe a local value's relation to the global program."""
    return _said(walk, value, walk.values[value])


def _said(walk: Walk, operand: SSAValue, value: Value) -> str:
    if isinstance(value, Relation):
        return f"{walk.table.describe(value.held.number)} in {shards_of(value)}"
    if not isinstance(value, RankNumber):
        return "what a rank computes of its own"
    text = " + ".join([*(f"{n} x {axis}" for axis, n in value.terms), str(value.constant)])
    makers = reversed(_makers_of([operand], walk))  # operands first
    return f"the position {text} ({', '.join(map(describe, makers))})"
