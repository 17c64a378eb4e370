"""What to say of a result that was not proved: the first op at fault, and the likely cause."""

from __future__ import annotations

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir import dist
from shardweave.ir.annotations import describe
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.kernel import FusedOp
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Slot
from shardweave.ir.proof.held import Local, Part, Row, Value
from shardweave.ir.proof.walk import Walk
from shardweave.ir.types import shape_of


def explain(walk: Walk, slot: Slot, declared: Sharding, wanted: int) -> str:
    """Why a result does not relate to what it should."""
    value = walk.values[slot.value]
    goal = f"{slot.kind} '{slot.name}' is to be that of {walk.table.describe(wanted)}"
    op = _first_at_fault(walk, slot.value)
    if op is not None:
        return f"{describe(op)}: {_problem_of(walk, op)}. So {goal}, and is not shown to be."
    if not isinstance(value, Part):
        return f"{goal}, but relates to nothing."
    owner = slot.value.owner
    maker = describe(owner) if isinstance(owner, Operation) else "an argument"
    if value.held.number != wanted:
        known = walk.table.describe(value.held.number)
        return f"{goal}, but {maker} gives that of {known}."
    attribute = ShardingAttr.of(declared, value.held.shape)
    return (
        f"{slot.kind} '{slot.name}': {maker} gives {shards_of(value)}, but it is declared "
        f"{attribute}; correct the collectives before the return, or dist.sharding."
    )


def shards_of(value: Part) -> str:
    """In which shards a value is, in words."""
    held = value.held
    text = str(ShardingAttr.of(held.sharding, held.shape)) if held.layout is None else "moved parts"
    times = [f"{axis} {sorted(which)}" for axis, which in value.at]
    return text + (f" of {', '.join(times)}" if times else "")


def _first_at_fault(walk: Walk, value: SSAValue) -> Operation | None:
    """The first op, in program order, whose result relates to nothing though its operands do,
    among those that a value is computed of."""
    seen: set[Operation] = set()
    stack, order = [value], dict[Operation, int]()
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, Block) or owner in seen:
            continue
        seen.add(owner)
        if any(_is_unrelated(walk, result) for result in owner.results):
            stack += list(owner.operands)
            if isinstance(owner, FusedOp):
                stack += [v for v in owner.yielded if _is_unrelated(walk, v)]
            elif not any(_is_unrelated(walk, operand) for operand in owner.operands):
                order[owner] = len(order)
    block = next((op.parent_block() for op in order), None)
    if block is None:
        return None
    places = {op: index for index, op in enumerate(block.ops)}
    return min(order, key=lambda op: places.get(op, len(places)))


def _is_unrelated(walk: Walk, value: SSAValue) -> bool:
    return _contains_local(walk.values[value], walk)


def _contains_local(value: Value, walk: Walk) -> bool:
    if isinstance(value, Row):
        return any(_contains_local(piece, walk) for piece, _ in value.pieces)
    return isinstance(value, Local) or (
        isinstance(value, Part) and value.held.number >= walk.table.num_read
    )


def _problem_of(walk: Walk, op: Operation) -> str:
    values = [walk.values[value] for value in op.operands]
    refusal = walk.refusals.get(op)
    if refusal is not None:
        if refusal.operand is None:
            return refusal.problem
        name = op.operands[refusal.operand].name_hint or refusal.operand
        tail = f" {op.name}" if refusal.problem.endswith("before") else ""
        return f"operand {refusal.operand} (%{name}) {refusal.problem}{tail}"
    if isinstance(op, dist.DistOp):
        return _problem_of_collective(op, values)
    read = [
        f"%{operand.name_hint} = {_said(walk, value)}"
        for operand, value in zip(op.operands, values, strict=True)
    ]
    return f"the model computes no such {op.name} of {', '.join(read) or 'nothing'}"


def _problem_of_collective(op: dist.DistOp, values: list[Value]) -> str:
    axes = ", ".join(op.axes)
    for operand, value in zip(op.operands, values, strict=True):
        name = f"%{operand.name_hint}"
        if isinstance(value, Part):
            shards = shards_of(value)
            if isinstance(op, dist.AllReduceOp | dist.ReduceScatterOp):
                return f"{name} is to be reduced over {axes}, but is {shards}"
            return f"{name} cannot be moved so over {axes}: it is {shards} {shape_of(operand)}"
    return f"it has no operand that relates to the model, over {axes}"


def _said(walk: Walk, value: Value) -> str:
    if not isinstance(value, Part):
        return "a rank's own value"
    return f"{walk.table.describe(value.held.number)} in {shards_of(value)}"
