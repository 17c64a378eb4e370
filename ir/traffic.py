"""Bytes that ops read from memory and write to it, one by one or together in a kernel."""

from __future__ import annotations

from collections.abc import Collection

from xdsl.ir import Operation, SSAValue

from shardweave.ir.kernel import FusedOp
from shardweave.ir.types import num_bytes, tensor_type_of

_FREE = frozenset({"aten.view", "aten.permute", "aten.expand"})
"""Ops whose result shares the memory of their operand."""

_PARTIAL = {"aten.embedding": 0, "aten.gather": 0, "aten.slice.Tensor": 0, "aten.select.int": 0}
"""Ops that read of this operand only what they return."""


def storage_of(value: SSAValue) -> SSAValue:
    """The value whose memory a view shares."""
    while isinstance(value.owner, Operation) and value.owner.name in _FREE:
        value = value.owner.operands[0]
    return value


def traffic(ops: Collection[Operation]) -> int:
    """Bytes that a kernel of these ops moves: its inputs and its outputs, each once.

    Views share their operand's memory; of a table that is looked up, and of a value that is
    sliced, what is taken counts.
    """
    members = set(ops)
    read: dict[SSAValue, int] = {}
    written: dict[SSAValue, int] = {}
    for op in ops:
        if op.name in _FREE:
            continue
        for index, operand in enumerate(op.operands):
            source = storage_of(operand)
            if source.owner not in members:
                size = min(_bytes(operand), _bytes(source))
                if _PARTIAL.get(op.name) == index:
                    size = min(size, _bytes(op.results[0]))
                read[source] = max(size, read.get(source, 0))
        for result in op.results:
            if _is_read_outside(result, members):
                written[result] = _bytes(result)
    return sum(read.values()) + sum(written.values())


def _is_read_outside(value: SSAValue, members: set[Operation]) -> bool:
    """Whether an op that is not a member reads the value or a view of it."""
    return any(
        use.operation not in members
        or (use.operation.name in _FREE and _is_read_outside(use.operation.results[0], members))
        for use in value.uses
    )


def _bytes(value: SSAValue) -> int:
    return num_bytes(tensor_type_of(value))


def bytes_moved(op: Operation) -> int:
    """`traffic` of one op, or of all ops of a fused region."""
    return traffic(op.fused_ops) if isinstance(op, FusedOp) else traffic([op])
