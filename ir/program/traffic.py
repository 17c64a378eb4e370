"""Bytes that ops read from memory and write to it, one by one or together in a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import DistOp, RingJoinOp, SliceOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, num_elements, tensor_type_of
from shardweave.ir.library.positional_attention import logsumexp_dtype
from shardweave.ir.ops.registry import first_of_attention, spec_of
from shardweave.ir.program.blocks import Blocks, blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import added_rows, copies, is_view, layout_source


def bytes_moved(op: Operation) -> int:
    """Bytes that one op reads and writes; a fused region counts as one kernel.

    Views, waits, ring slices and collectives count 0. A lookup counts the rows that it reads, not
    the table; an operand that is passed twice counts twice.
    """
    if isinstance(op, FusedOp):
        return traffic(op.fused_ops)
    if isinstance(op, (SliceOp, RingJoinOp)):
        return 2 * _bytes(op.results[0])
    if isinstance(op, DistOp) or is_view(op):
        return 0
    written = sum(map(_bytes, op.results))
    if spec_of(op).is_lookup:
        return 2 * written + sum(map(_bytes, op.operands[1:]))
    return written + sum(map(_bytes, op.operands))


def merged_bytes(op: AtenOp, pieces: int) -> int:
    """Bytes moved, beside the kernels, to merge the results of an attention's `pieces`.

    Forward, a piece's result is written, scaled in the log-sum-exp's precision, and added to the
    total, which is scaled before. Backward, a piece's gradients of queries, keys and values are
    added to the totals. At the end totals are cast.
    """
    first = first_of_attention(op)
    query, key = op.operands[first : first + 2]
    narrow = dtype_of_value(query).itemsize
    wide = logsumexp_dtype(dtype_of_value(query)).itemsize
    rows, cast = num_elements(query), 2 * wide + narrow
    if not first:
        return rows * (pieces * (6 * wide + 2 * narrow) + cast) if pieces > 1 else 0
    each = 2 * wide + 2 * narrow
    return rows * (pieces * each + cast) + 2 * num_elements(key) * (each + cast)


def traffic(ops: Collection[Operation]) -> int:
    """Bytes that a kernel of these ops moves: it reads each input and writes each output once."""
    read, written = accesses(ops)
    return sum(read.values()) + sum(written.values())


def accesses(ops: Collection[Operation]) -> tuple[dict[SSAValue, int], dict[SSAValue, int]]:
    """Bytes that one kernel of `ops` (given in order) reads, and bytes that it writes, by value.

    A view or reshape that does not copy counts as the value that it shows. If a value is sliced or
    looked up, directly or after pointwise ops, only the elements taken count.
    """
    members = set(ops)
    read: dict[SSAValue, int] = {}
    written: dict[SSAValue, int] = {}
    needed: Counter[SSAValue] = Counter()
    for op in reversed(list(ops)):
        spec = spec_of(op)
        is_view_here = spec.is_layout and not copies(op)
        is_one_by_one = is_view_here or spec.role in ("pointwise", "move")
        for result in op.results:
            if not is_view_here and _is_read_outside(result, members):
                written[result] = _bytes(result)
        outputs = (_numel(v) if v in written else needed[v] for v in op.results)
        count = max(outputs, default=0)
        added = added_rows(op)
        if added is not None and added[0] in members and op.results[0] in written:
            # Of the table only rows to which something is added, at most one for each index.
            count = min(count, _numel(added[0].operands[0]))
            written[op.results[0]] = count * _bytes(op.results[0]) // _numel(op.results[0])
        for operand in op.operands:
            # Each element that an op gives takes one of each operand, unless it sums.
            own = _numel(operand)
            own = min(own, count) if is_one_by_one else own
            needed[operand] = max(needed[operand], own)
            source = layout_source(operand, in_place=True)
            if source.owner not in members and not is_view_here:
                size = min(own * _bytes(operand) // _numel(operand), _bytes(source))
                read[source] = max(size, read.get(source, 0))
    return dict(reversed(read.items())), dict(reversed(written.items()))


def _is_read_outside(value: SSAValue, members: set[Operation]) -> bool:
    """True if an op that is not a member reads the value or a layout of it."""
    return any(
        use.operation not in members
        or (
            spec_of(use.operation).is_layout
            and not copies(use.operation)
            and _is_read_outside(use.operation.results[0], members)
        )
        for use in value.uses
    )


def _bytes(value: SSAValue) -> int:
    return num_bytes(tensor_type_of(value))


def _numel(value: SSAValue) -> int:
    return max(1, num_elements(value))


def bytes_by_block(program: Program) -> dict[str, int]:
    """Sum `bytes_moved` by repeated block (`h.3`, else ""); a region counts where most ops are."""
    sizes: Counter[str] = Counter()
    blocks = blocks_of(program)
    for op in program.ops:
        sizes[_block_of(op, blocks) or ""] += bytes_moved(op)
    return dict(sizes)


def _block_of(op: Operation, blocks: Blocks) -> str | None:
    if not isinstance(op, FusedOp):
        return blocks.of_op(op)
    counts = Counter(filter(None, map(blocks.of_op, op.fused_ops)))
    return counts.most_common(1)[0][0] if counts else None
