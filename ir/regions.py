"""Where the forward pass ends, and what is kept for later."""

from __future__ import annotations

from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.dist import AllGatherOp
from shardweave.ir.program import Program
from shardweave.ir.syntax import phase_of
from shardweave.ir.types import num_bytes, tensor_type_of

VIEWS = frozenset({"aten.view", "aten.permute", "aten.expand"})
"""Ops whose result shares the memory of their operand."""


WEIGHT_VIEWS = VIEWS | {"aten._to_copy"}
"""Ops whose result is as good as the weight that they are given."""


def weight_ops(program: Program) -> list[Operation]:
    """The ops that bring parameters from their shards as stored to the form that is computed
    with: all-gathers, views, casts. They read parameters alone."""
    known = {slot.value for slot in program.arguments if slot.kind == "param"}
    found: list[Operation] = []
    for op in program.ops:
        is_one = op.name in WEIGHT_VIEWS or type(op) is AllGatherOp
        if is_one and all(value in known for value in op.operands):
            known.update(op.results)
            found.append(op)
    return found


def split_at_backward(program: Program) -> tuple[list[Operation], list[Operation]]:
    """The ops before the first backward op, and the rest."""
    ops = list(program.ops)
    for index, op in enumerate(ops):
        if phase_of(op) in ("backward", "recompute"):
            return ops[:index], ops[index:]
    return ops, []


def storage_of(value: SSAValue) -> SSAValue:
    """The value whose memory a view shares."""
    while isinstance(value.owner, Operation) and value.owner.name in VIEWS:
        value = value.owner.operands[0]
    return value


def kept_values(program: Program) -> list[SSAValue]:
    """Results of forward ops that the rest of the step reads: what memory holds in between.

    Each sub-batch has its own beginning of the backward pass, so that the order of sub-batches
    does not change what is kept.
    """
    made: set[SSAValue] = set()
    found: dict[SSAValue, None] = {}
    turned: set[Attribute | None] = set()
    for op in program.ops:
        copy = op.properties.get("copy")
        if phase_of(op) in ("backward", "recompute"):
            turned.add(copy)
        if copy in turned or (copy is None and turned):
            storages = map(storage_of, op.operands)
            found.update(dict.fromkeys(storage for storage in storages if storage in made))
        else:
            made.update(op.results)
    return list(found)


def kept_bytes(program: Program) -> int:
    """Bytes of `kept_values` on one device."""
    return sum(num_bytes(tensor_type_of(value)) for value in kept_values(program))
