"""Where the forward pass ends, and which ops bring weights."""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import STARTS, CollectiveOp, SliceOp
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program


def weight_ops(program: Program) -> list[Operation]:
    """The ops that bring parameters from their shards as stored to the form that is computed
    with: all-gathers, views, casts, and what makes other shards of what was gathered. They read
    parameters alone."""
    known = {slot.value for slot in program.arguments if slot.kind == "param"}
    gathered: set[SSAValue] = set()
    found: list[Operation] = []
    for op in program.ops:
        is_gather = isinstance(op, CollectiveOp) and op.is_gather and type(op) in STARTS
        recuts = isinstance(op, SliceOp) or spec_of(op).resizes
        brings = spec_of(op).keeps_weight or is_gather
        brings = brings or (recuts and gathered.issuperset(op.operands))
        if brings and all(value in known for value in op.operands):
            known.update(op.results)
            found.append(op)
            if is_gather or not gathered.isdisjoint(op.operands):
                gathered.update(op.results)
    return found


def split_at_backward(program: Program) -> tuple[list[Operation], list[Operation]]:
    """The ops before the first backward op, and the rest."""
    ops = list(program.ops)
    for index, op in enumerate(ops):
        if phase_of(op) in ("backward", "recompute"):
            return ops[:index], ops[index:]
    return ops, []
