"""bucket-collectives: small weights and gradients are joined into messages of limited size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from xdsl.ir import Operation
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import Copy, arguments_of, copy_of, phase_of
from shardweave.ir.dialects.dist import AllGatherOp
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, tensor_type_of
from shardweave.ir.program.blocks import blocks_of, weight_ops
from shardweave.ir.program.program import Program
from shardweave.passes.messages.gradient_buckets import bucket_gradients
from shardweave.passes.messages.merge_collectives import BUCKET_BYTES
from shardweave.passes.messages.rows import join_gathers
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass
class _Run:
    """Gathers that follow each other and belong to one block, phase and sub-batch."""

    block: str | None
    phase: str
    copy: Copy | None
    gathers: list[AllGatherOp] = field(default_factory=list[AllGatherOp])
    bytes: int = 0


def bucket_weights(program: Program, bucket_bytes: int, alone_bytes: int) -> int:
    """Join all-gathers of a block's small weights into collectives of at most `bucket_bytes`.

    A weight whose gathered size is `alone_bytes` or more is not joined, since joining costs two
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
"""Size of the first bucket: small, so that communication starts early in the backward pass."""

ALONE_BYTES = 2**21
"""Size from which copying a tensor into and out of a joined message takes longer than a message of
its own: with gloo a message takes 0.7 ms of a core, and a copy of this size as much."""


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
