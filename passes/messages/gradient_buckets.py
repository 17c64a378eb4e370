"""Gradient buckets: reductions joined into messages that overlap the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeGuard, cast

from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    copy_of,
    layer_of,
    phase_of,
    set_layer,
)
from shardweave.ir.dialects.builder import on_some
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program, shardings_of
from shardweave.passes.messages.merge_collectives import Buckets, merge_group, operand_bytes
from shardweave.passes.messages.rows import join_scatters


def bucket_gradients(
    program: Program,
    bucket_bytes: int,
    first_bytes: int | None = None,
    alone_bytes: int | None = None,
) -> int:
    """Join the reductions of gradients into messages of at most `bucket_bytes`; return their
    number.

    Reduce-scatters are joined only within a block. first_bytes: limit of the first bucket of
    all-reduces, which doubles for each later bucket, so that messages start early; sums that are
    arguments of the function exist when it begins, and fill whole buckets. alone_bytes: a gradient
    of at least this size is not joined, which saves copies. A gradient that is reduced over one
    axis and then over another is bucketed both times. Takes time linear in the ops.
    """
    rounds = _rounds(program)
    for reductions in rounds:
        _bucket(program, reductions, bucket_bytes, first_bytes, alone_bytes)
    return sum(map(len, rounds))


def _bucket(
    program: Program,
    reductions: Sequence[dist.DistOp],
    bucket_bytes: int,
    first_bytes: int | None,
    alone_bytes: int | None,
) -> None:
    """Join reductions that do not read each other's results."""
    sums, scatters = Buckets(bucket_bytes, first_bytes), Buckets(bucket_bytes)
    # Sums of micro-batches are all there when their function begins: there is no work beside which
    # a small first message could travel.
    given = Buckets(bucket_bytes)
    blocks = blocks_of(program)
    stretch, block = 0, None
    for op in _place_by_production(program, reductions):
        # Gradients that are scattered block by block can be freed block by block.
        if blocks.of_op(op) != block:
            stretch, block = stretch + 1, blocks.of_op(op)
        if alone_bytes is not None and operand_bytes(op) >= alone_bytes:
            continue
        reduction = op.reduction if isinstance(op, dist.AllReduceOp) else "sum"
        dtype = dtype_of_value(op.operands[0])
        key = (op.axes, reduction, copy_of(op), phase_of(op), dtype, _left_pending(op, program))
        if isinstance(op, dist.ReduceScatterOp):
            scatters.add((*key, stretch), op)
        elif isinstance(op.operands[0].owner, Block):
            given.add(key, op)
        else:
            sums.add(key, op)
    for members in (*given.close(), *sums.close()):
        _put_casts_behind(members)
        merge_group(members)
    for members in scatters.close():
        _put_casts_behind(members)
        join_scatters(cast("list[dist.ReduceScatterOp]", members))


def gradient_reductions(program: Program) -> set[dist.DistOp]:
    """The blocking reductions of gradients that are only returned, or only read by another one."""
    return {op for ops in _rounds(program) for op in ops}


def _rounds(program: Program) -> list[list[dist.DistOp]]:
    """Reductions of gradients in rounds: the last round's are returned, an earlier round's are only
    read by the next, such as reduce-scatters whose shards are summed over further replicas."""
    rounds = [_last_reductions(program)]
    while rounds[0]:
        later = set(rounds[0])
        earlier: list[dist.DistOp] = [
            op
            for op in program.ops
            if _is_reduction(op) and all(_is_read_by(_at_end(v), later) for v in op.results)
        ]
        rounds.insert(0, earlier)
    return rounds


def _left_pending(op: Operation, program: Program) -> frozenset[str]:
    """The axes over which a reduction's result is still unreduced, such as the sequence's axes for
    the gradient of a norm under sequence parallelism."""
    (sharding,) = shardings_of(op, program) if len(op.results) == 1 else (None,)
    return frozenset() if sharding is None else frozenset(sharding.unreduced)


def _is_reduction(op: Operation) -> TypeGuard[dist.AllReduceOp | dist.ReduceScatterOp]:
    return type(op) is dist.AllReduceOp or type(op) is dist.ReduceScatterOp


def _is_read_by(value: SSAValue, readers: Collection[Operation]) -> bool:
    users = [use.operation for use in value.uses]
    return bool(users) and all(user in readers for user in users)


def _last_reductions(program: Program) -> list[dist.DistOp]:
    """Blocking reductions whose results are only returned, at least one of them as a gradient. The
    others may be a loss that `merge-collectives` has joined with gradients. A stage's function
    returns gradients of a micro-batch in slots of kind `sum`."""
    last = program.return_op
    gradients = {slot.value for slot in program.results if slot.kind in ("grad", "sum")}
    gradients -= {slot.value for slot in program.results if slot.kind not in ("grad", "sum")}

    return [
        op
        for op in program.ops
        if _is_reduction(op)
        and all(_is_read_by(_at_end(value), {last}) for value in op.results)
        and any(_at_end(value) in gradients for value in op.results)
    ]


def _put_casts_behind(members: Sequence[dist.DistOp]) -> None:
    """Move casts of the members' results after the last member, the joined op's position."""
    for value in [value for member in reversed(members) for value in reversed(member.results)]:
        cast = _at_end(value)
        if cast is not value and isinstance(cast.owner, Operation):
            cast.owner.detach()
            Rewriter.insert_op(cast.owner, InsertPoint.after(members[-1]))


def _at_end(value: SSAValue) -> SSAValue:
    """The result of a reduced value's cast, if `reduce-in` added one; else the value itself."""
    users = [use.operation for use in value.uses]
    is_cast = len(users) == 1 and spec_of(users[0]).view == "cast"
    return users[0].results[0] if is_cast else value


def _place_by_production(
    program: Program, reductions: Sequence[dist.DistOp]
) -> Iterator[dist.DistOp]:
    """Split joined reductions, and put each one right after the op that makes its gradient."""
    by_producer: dict[Operation | Block, list[dist.DistOp]] = {}
    for op in reductions:
        for single in _singles(op):
            by_producer.setdefault(single.operands[0].owner, []).append(single)
    block = program.function.body.block
    if block in by_producer:
        Rewriter.insert_op(by_producer[block], InsertPoint.at_start(block))
        yield from by_producer[block]
    for producer in [op for op in program.ops if op in by_producer]:
        Rewriter.insert_op(by_producer[producer], InsertPoint.after(producer))
        yield from by_producer[producer]


def _singles(op: dist.DistOp) -> list[dist.DistOp]:
    """Split a collective into one for each operand, not yet inserted, and redirect its uses."""
    op.detach()
    if len(op.operands) == 1:
        return [op]
    singles = [on_some(op, [index]) for index in range(len(op.operands))]
    for single, result in zip(singles, op.results, strict=True):
        maker = single.operands[0].owner
        if isinstance(maker, Operation) and layer_of(maker):
            set_layer(single, layer_of(maker))
        result.replace_all_uses_with(single.results[0])
    op.erase()
    return singles
