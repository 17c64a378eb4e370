"""Moving waits for gradients up, so that few unreduced gradients exist at once."""

from __future__ import annotations

from xdsl.ir import Operation

from shardweave.ir.dialects.dist import StartedOp, WaitOp
from shardweave.ir.program.program import Program


def wait_early(program: Program) -> None:
    """Move the waits for gradients that are only returned, and the ops after them, further up.

    Schedules leave these waits to the end of the step. Here each wait follows the start of the next
    collective of gradients, as in FSDP2. Takes linear time.
    """
    tails = _tails(program)
    order: dict[Operation, None] = {}
    before: StartedOp | None = None
    for op in program.ops:
        if op in tails:
            continue
        order[op] = None
        if isinstance(op, StartedOp) and not tails.isdisjoint(_users(op)):
            if before is not None:
                _place(before, tails, order)
            before = op
    program.reorder([*order, *(op for op in program.ops if op not in order)])


def _users(op: Operation) -> list[Operation]:
    return [use.operation for result in op.results for use in result.uses]


def _tails(program: Program) -> set[Operation]:
    """The waits that lead only to returned gradients, and the ops between them and the return."""
    gradients = {slot.value for slot in program.results if slot.kind == "grad"}
    outputs = {slot.value for slot in program.results} - gradients
    last: set[Operation] = {program.return_op}
    for op in reversed(list(program.ops)):
        if not isinstance(op, StartedOp) and outputs.isdisjoint(op.results):
            users = _users(op)
            if users and last.issuperset(users):
                last.add(op)
    tails: set[Operation] = set()
    for op in program.ops:
        is_behind = any(value.owner in tails for value in op.operands)
        if op in last and (isinstance(op, WaitOp) or is_behind):
            tails.add(op)
    return tails


def _place(start: Operation, tails: set[Operation], order: dict[Operation, None]) -> None:
    """Append to `order` the ops of `tails` that depend on `start` and whose operands exist."""
    stack = _users(start)[::-1]
    while stack:
        op = stack.pop()
        owners = [value.owner for value in op.operands]
        is_ready = all(not isinstance(owner, Operation) or owner in order for owner in owners)
        if op in tails and op not in order and is_ready:
            order[op] = None
            stack += _users(op)[::-1]
