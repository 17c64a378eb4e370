"""Removing ops whose results nobody uses."""

from __future__ import annotations

from xdsl.ir import Operation
from xdsl.rewriter import Rewriter

from shardweave.ir.program.program import Program


def remove_dead_ops(program: Program) -> int:
    """Erase every op without uses, last first; returns how many. Takes time linear in the ops."""
    removed = 0
    op: Operation | None = program.return_op.prev_op
    while op is not None:
        previous = op.prev_op
        # An op without results, such as a send, is kept for its effect.
        if op.results and all(result.first_use is None for result in op.results):
            Rewriter.erase_op(op)
            removed += 1
        op = previous
    return removed
