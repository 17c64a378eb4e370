"""Bytes that ops read from memory and write to it, one by one or together in a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from xdsl.ir import Operation, SSAValue

from shardweave.ir.blocks import Blocks, blocks_of
from shardweave.ir.dist import DistOp
from shardweave.ir.kernel import FusedOp
from shardweave.ir.program import Program
from shardweave.ir.regions import VIEWS, storage_of
from shardweave.ir.types import num_bytes, tensor_type_of

_PARTIAL = {"aten.embedding": 0, "aten.gather": 0, "aten.slice.Tensor": 0, "aten.select.int": 0}
"""Ops that read of this operand only what they return."""


def traffic(ops: Collection[Operation]) -> int:
    """Bytes that a kernel of these ops moves: its inputs and its outputs, each once.

    Views share their operand's memory; of a table that is looked up, and of a value that is
    sliced, what is taken counts.
    """
    members = set(ops)
    read: dict[SSAValue, int] = {}
    written: dict[SSAValue, int] = {}
    for op in ops:
        if op.name in VIEWS:
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
        or (use.operation.name in VIEWS and _is_read_outside(use.operation.results[0], members))
        for use in value.uses
    )


def _bytes(value: SSAValue) -> int:
    return num_bytes(tensor_type_of(value))


def bytes_moved(op: Operation) -> int:
    """`traffic` of one op, or of all ops of a fused region; collectives are not counted."""
    if isinstance(op, DistOp):
        return 0
    return traffic(op.fused_ops) if isinstance(op, FusedOp) else traffic([op])


def bytes_by_block(program: Program) -> dict[str, int]:
    """`bytes_moved` by repeated block (`h.3`); "" has what lies in none.

    A region counts for the block that most of its ops are in.
    """
    found: Counter[str] = Counter()
    blocks = blocks_of(program)
    for op in program.ops:
        found[_block_of(op, blocks) or ""] += bytes_moved(op)
    return dict(found)


def _block_of(op: Operation, blocks: Blocks) -> str | None:
    if not isinstance(op, FusedOp):
        return blocks.of_op(op)
    counts = Counter(filter(None, map(blocks.of_op, op.fused_ops)))
    return counts.most_common(1)[0][0] if counts else None
