"""bucket-collectives: which messages of weights and gradients travel together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeGuard, cast

from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    Copy,
    arguments_of,
    copy_of,
    layer_of,
    phase_of,
    set_layer,
)
from shardweave.ir.dialects.builder import on_some
from shardweave.ir.dialects.dist import AllGatherOp
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, tensor_type_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.blocks import blocks_of, weight_ops
from shardweave.ir.program.program import Program, shardings_of
from shardweave.passes.messages.merge_collectives import (
    BUCKET_BYTES,
    Buckets,
    merge_group,
    operand_bytes,
)
from shardweave.passes.messages.rows import join_gathers, join_scatters
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


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
    """Move the casts of members' results behind the last member, where the joined op will stand."""
    for value in [value for member in reversed(members) for value in reversed(member.results)]:
        cast = _at_end(value)
        if cast is not value and isinstance(cast.owner, Operation):
            cast.owner.detach()
            Rewriter.insert_op(cast.owner, InsertPoint.after(members[-1]))


def _at_end(value: SSAValue) -> SSAValue:
    """The cast of a reduced value (`reduce-in` sums in another dtype), or the value itself."""
    users = [use.operation for use in value.uses]
    is_cast = len(users) == 1 and spec_of(users[0]).view == "cast"
    return users[0].results[0] if is_cast else value


def _place_by_production(
    program: Program, reductions: Sequence[dist.DistOp]
) -> Iterator[dist.DistOp]:
    """Put each gradient's reduction, on its own, right after the op that makes the gradient."""
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
    """Split a collective into detached ones with one operand each, and give them its uses."""
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


@dataclass
class _Run:
    """The gathers that follow each other for one block, in one pass and sub-batch."""

    block: str | None
    phase: str
    copy: Copy | None
    gathers: list[AllGatherOp] = field(default_factory=list[AllGatherOp])
    bytes: int = 0


def bucket_weights(program: Program, bucket_bytes: int, alone_bytes: int) -> int:
    """Join all-gathers of a block's small weights into collectives of at most `bucket_bytes`.

    A weight of `alone_bytes` or more after its gather is not joined, since joining costs two
    copies. Weights that the forward pass gathers last and the backward pass first are gathered
    once. Returns the number of gathers before joining. Takes time linear in the ops.
    """
    order = {op: index for index, op in enumerate(program.ops)}
    runs = _runs(program, bucket_bytes)
    count = sum(len(run.gathers) for run in runs)
    _keep_the_last(runs)
    for run in runs:
        small: dict[object, list[AllGatherOp]] = {}
        for op in run.gathers:
            is_stored = not any(isinstance(a, AllGatherOp) for a in _sources(op))
            if is_stored and _gathered_bytes(op) < alone_bytes:
                small.setdefault((op.axes, dtype_of_value(op.operands[0])), []).append(op)
        for members in small.values():
            _join(members, order)
    return count


def _runs(program: Program, bucket_bytes: int) -> list[_Run]:
    blocks = blocks_of(program)
    runs: list[_Run] = []
    for op in weight_ops(program):
        if type(op) is not AllGatherOp or len(op.operands) != 1:
            continue
        place, size = (blocks.of_op(op), phase_of(op), copy_of(op)), _gathered_bytes(op)
        run = runs[-1] if runs else None
        if run is None or (run.block, run.phase, run.copy) != place or (
            run.bytes + size > bucket_bytes
        ):  # fmt: skip
            run = _Run(*place)
            runs.append(run)
        run.gathers.append(op)
        run.bytes += size
    return runs


def _keep_the_last(runs: Sequence[_Run]) -> None:
    """Reuse the forward pass's last gathers for equal first gathers of the backward pass."""
    for before, after in pairwise(runs):
        if (before.phase, after.phase) != ("forward", "recompute") or before.copy != after.copy:
            continue
        known = {_key(op): op for op in before.gathers}
        for op in list(after.gathers):
            if twin := known.get(_key(op)):
                Rewriter.replace_op(op, [], twin.results)
                after.gathers.remove(op)


def _key(op: Operation) -> object:
    return tuple(op.operands), arguments_of(op), tuple(op.result_types)


def _gathered_bytes(op: AllGatherOp) -> int:
    return num_bytes(tensor_type_of(op.results[0]))


def _sources(op: Operation) -> list[Operation]:
    sources: list[Operation] = []
    owner = op.operands[0].owner
    while isinstance(owner, Operation):
        sources.insert(0, owner)
        owner = owner.operands[0].owner
    return sources


def _join(members: Sequence[AllGatherOp], order: dict[Operation, int]) -> None:
    """Join gathers in place of the first; moves the ops that make their shards before it."""
    if len(members) == 1:
        return
    first = members[0]
    for source in dict.fromkeys(source for op in members[1:] for source in _sources(op)):
        if order[source] > order[first]:
            source.detach()
            Rewriter.insert_op(source, InsertPoint.before(first))
            order[source] = order[first]
    join_gathers(members)


FIRST_BYTES = 2**20
"""The first bucket is small, so that the link has work early in the backward pass."""

ALONE_BYTES = 2**21
"""From here on, copying a tensor into a message and out of it takes longer than a message of its
own: with gloo one takes 0.7 ms of a core, and a copy of this size as much."""


@dataclass(frozen=True)
class BucketCollectivesPass(PassOnProgram):
    """Join the messages of small weights and gradients, and let large ones travel alone.

    Reductions whose results are only returned, as gradients, are joined per axes, dtype and
    sub-batch, in order of production, and are sent as soon as the last gradient is made, so that
    with `start-collectives` they overlap the rest of the backward pass; messages that
    `merge-collectives` made longer are split again. The first bucket has at most `first_bytes`
    (default 1 MiB), each later one twice as much, up to `bytes` (default 25 MiB); sums that are
    arguments of a function fill buckets of `bytes` from the first on. Gathers of parameters that
    are stored in shards are joined per block, axes and dtype, in runs of at most `bytes`, in place
    of the first; weights that the forward pass gathers last stay gathered if the backward pass
    begins with them. A tensor of `alone_bytes` or more (default 2 MiB) is not joined, and so not
    copied.

    Joined all-reduces are one op of several operands. Joined gathers and reduce-scatters are rows,
    one for each rank, of one matrix.

    Requires: a local program before `start-collectives`, after `rematerialize`. Ensures: numerics
    unchanged; not more bytes. Takes linear time.
    """

    name = "bucket-collectives"
    bytes: int = BUCKET_BYTES
    first_bytes: int = FIRST_BYTES
    alone_bytes: int = ALONE_BYTES

    def run(self, program: Program) -> None:
        for name in ("bytes", "first_bytes", "alone_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; give at least 1 byte.")
        count = bucket_weights(program, self.bytes, self.alone_bytes)
        count += bucket_gradients(program, self.bytes, self.first_bytes, self.alone_bytes)
        if not count:
            note(
                "no gradient is reduced on its own, and no weight is gathered; run "
                "bucket-collectives after insert-collectives and before start-collectives, on a "
                "program whose batch is sharded."
            )
