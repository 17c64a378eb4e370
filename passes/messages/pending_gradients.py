"""Gradients left unreduced, so that terms of micro-batches are added before one reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.ir import Attribute, Block, Operation, OpResult, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import on_some
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program


def leave_gradients_pending(program: Program) -> int:
    """Remove the all-reduces whose sums are only returned, as gradients.

    Each such gradient is returned as this rank's term, and its `dist.sharding` lists the unreduced
    axes. Reduce-scatters stay. Returns the number of unreduced gradients. Takes linear time.

    Requires: a local program.
    """
    pending: dict[SSAValue, int] = {}
    attributes: dict[int, Attribute | None] = {}
    for index, slot in enumerate(program.results):
        start = _reduction_of(slot.value) if slot.kind == "grad" else None
        if start is None or _term_of(slot.value).type != slot.value.type:
            continue
        held = program.sharding_of_slot(slot)
        left = Sharding(held.dims, (*held.unreduced, *start.axes))
        shape = held.global_shape(shape_of(slot.value))
        attributes[index] = ShardingAttr.of(left, shape)
        pending[slot.value] = index
    operands = list(program.return_op.operands)
    for value, index in pending.items():
        operands[index] = _term_of(value)
    program.return_op.operands = operands
    program.set_result_attributes("dist.sharding", attributes)
    totals = [_total_of(value) for value in pending]
    casts = [value.owner for value in pending if _is_cast(value)]
    sent = [_sent_of(total) for total in totals]
    casts_before = [term.owner for term in sent if _is_cast(term)]
    _erase_unread(casts)
    for op in dict.fromkeys(total.owner for total in totals):
        assert isinstance(op, Operation)
        _drop_unread(op)
    _erase_unread(casts_before)
    return len(pending)


def pending_terms(program: Program) -> dict[str, SSAValue]:
    """This rank's terms of gradients that `leave_gradients_pending` would leave unreduced, by name.
    Leaves out gradients whose terms have other uses. Takes linear time."""
    terms: dict[str, SSAValue] = {}
    for slot in program.results:
        if slot.kind == "grad" and _reduction_of(slot.value) is not None:
            term = _term_of(slot.value)
            if term.has_one_use() and isinstance(term.owner, Operation):
                terms[slot.name] = term
    return terms


def _reduction_of(value: SSAValue) -> dist.AllReduceOp | None:
    total = _total_of(value)
    op = total.owner
    if not value.has_one_use() or not total.has_one_use():
        return None
    if isinstance(op, dist.WaitOp):
        op = op.operands[0].owner
    return op if isinstance(op, dist.AllReduceOp) and op.reduction == "sum" else None


def _total_of(value: SSAValue) -> SSAValue:
    """The operand of `value` if it is a cast (`reduce-in` adds casts); else `value` itself."""
    op = value.owner
    return op.operands[0] if isinstance(op, AtenOp) and spec_of(op).view == "cast" else value


def _is_cast(value: SSAValue) -> bool:
    return _total_of(value) is not value


def _term_of(value: SSAValue) -> SSAValue:
    """The operand whose all-reduce gives `value`, before any cast that `reduce-in` added."""
    total = _total_of(value)
    term = _sent_of(total)
    return term if total is value else _total_of(term)


def _sent_of(total: SSAValue) -> SSAValue:
    """The operand of an all-reduce, or of its start, whose sum over ranks is `total`."""
    op = total.owner
    assert isinstance(total, OpResult)
    assert isinstance(op, Operation)
    sent = op.operands[total.index]
    return _sent_of(sent) if isinstance(op, dist.WaitOp) else sent


def _erase_unread(ops: Iterable[Operation | Block]) -> None:
    for op in dict.fromkeys(ops):
        assert isinstance(op, Operation)
        if all(result.first_use is None for result in op.results):
            Rewriter.erase_op(op)


def _drop_unread(op: Operation) -> None:
    """Remove operands whose results are unread from a collective, or the whole collective."""
    kept = [index for index, result in enumerate(op.results) if result.first_use is not None]
    start = op.operands[0].owner if isinstance(op, dist.WaitOp) else None
    _keep(op, kept)
    if isinstance(start, Operation):
        _keep(start, kept)


def _keep(op: Operation, kept: Sequence[int]) -> None:
    """Replace an op by one with only the operands and results at indices `kept`."""
    if not kept:
        Rewriter.erase_op(op)
        return
    fewer = on_some(op, kept)
    Rewriter.insert_op(fewer, InsertPoint.before(op))
    for index, result in zip(kept, fewer.results, strict=True):
        op.results[index].replace_all_uses_with(result)
    Rewriter.erase_op(op)
