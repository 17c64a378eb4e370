"""Where the forward pass ends, and which ops bring weights."""

from __future__ import annotations

from xdsl.ir import Operation

from shardweave.ir.annotations import phase_of
from shardweave.ir.dist import AllGatherOp
from shardweave.ir.facts import facts_of
from shardweave.ir.program import Program


def weight_ops(program: Program) -> list[Operation]:
    """The ops that bring parameters from their shards as stored to the form that is computed
    with: all-gathers, views, casts. They read parameters alone."""
    known = {slot.value for slot in program.arguments if slot.kind == "param"}
    found: list[Operation] = []
    for op in program.ops:
        brings = facts_of(op).keeps_weight or type(op) is AllGatherOp
        if brings and all(value in known for value in op.operands):
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
