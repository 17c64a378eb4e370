"""When a value of a program is used for the last time."""

from __future__ import annotations

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardweave.ir.program import Program


def last_uses(program: Program) -> dict[Operation, list[SSAValue]]:
    """For each op the values that can be freed after it, its own unread results included.

    Arguments and results of the program are not among them: the caller holds them.
    """
    kept = {slot.value for slot in program.results}
    last: dict[SSAValue, Operation] = {}
    for op in program.ops:
        for value in (*op.results, *op.operands):
            last[value] = op
    found: dict[Operation, list[SSAValue]] = {}
    for value, op in last.items():
        if value not in kept and not isinstance(value, BlockArgument):
            found.setdefault(op, []).append(value)
    return found
