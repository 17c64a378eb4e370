"""merge-collectives: all-reduces are joined into messages of several operands (buckets)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    copy_of,
    set_layer,
    set_sharding_attrs,
    sharding_attrs_of,
)
from shardweave.ir.dialects.builder import remade
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, tensor_type_of
from shardweave.ir.program.program import Program
from shardweave.passes.program_pass import PassOnProgram

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's bucket size, large enough for a link's full bandwidth."""


class Buckets:
    """Fills buckets of collectives that have equal keys, each of at most `limit` operand bytes.

    first: limit of each key's first bucket, if it is lower; the limit doubles for each later bucket
    of the key, up to `limit`.
    """

    def __init__(self, limit: int, first: int | None = None) -> None:
        self.limit = limit
        self.first = limit if first is None else min(first, limit)
        self._limits: dict[Hashable, int] = {}
        self.finished: list[list[dist.DistOp]] = []
        self._open: dict[Hashable, list[dist.DistOp]] = {}
        self._bytes: dict[Hashable, int] = {}
        self._keys: dict[Operation, Hashable] = {}

    def add(self, key: Hashable, op: dist.DistOp) -> None:
        """Add a collective to the open bucket of its key; closes the bucket first if it is full."""
        size = operand_bytes(op)
        limit = self._limits.setdefault(key, self.first)
        if key in self._open and self._bytes[key] + size > limit:
            self._close(key)
            self._limits[key] = min(2 * limit, self.limit)
        self._open.setdefault(key, []).append(op)
        self._bytes[key] = self._bytes.get(key, 0) + size
        self._keys[op] = key

    def close_before(self, user: Operation) -> None:
        """Close the buckets whose results `user` needs."""
        for operand in user.operands:
            owner = operand.owner
            if isinstance(owner, Operation) and owner in self._keys:
                self._close(self._keys[owner])

    def close(self) -> list[list[dist.DistOp]]:
        """Close all open buckets; returns every bucket."""
        for key in list(self._open):
            self._close(key)
        return self.finished

    def _close(self, key: Hashable) -> None:
        members = self._open.pop(key)
        del self._bytes[key]
        for member in members:
            del self._keys[member]
        self.finished.append(members)


def operand_bytes(op: Operation) -> int:
    return sum(num_bytes(tensor_type_of(value)) for value in op.operands)


def merge_group(members: Sequence[dist.DistOp]) -> None:
    """Replace collectives of one kind and equal arguments by one, in place of the last."""
    if len(members) == 1:
        return
    last = members[-1]
    operands = [value for member in members for value in member.operands]
    merged = remade(last, operands, [type_ for each in members for type_ in each.result_types])
    set_layer(merged, "")
    shardings = [sharding_attrs_of(member) or () for member in members]
    if all(shardings):
        set_sharding_attrs(merged, [sharding for group in shardings for sharding in group])
    Rewriter.insert_op(merged, InsertPoint.before(last))
    results = iter(merged.results)
    for member in members:
        Rewriter.replace_op(member, [], [next(results) for _ in member.results])


@dataclass(frozen=True)
class MergeCollectivesPass(PassOnProgram):
    """Join all-reduces over the same axes into one message with several operands.

    An all-reduce joins the open bucket of its axes, reduction, dtype and sub-batch. A bucket is
    closed before the first use of a member's result, or if it would exceed `bucket_bytes` (default
    25 MiB), and is sent at its last member's position. Gradients that are only returned thus
    become one message per bucket.

    Requires: a local program. Ensures: numerics unchanged; at most as many messages. Linear.
    """

    name = "merge-collectives"
    bucket_bytes: int = BUCKET_BYTES

    def run(self, program: Program) -> None:
        buckets = Buckets(self.bucket_bytes)
        for op in [*program.ops, program.return_op]:
            buckets.close_before(op)
            if type(op) is dist.AllReduceOp:
                dtype = dtype_of_value(op.operands[0])
                buckets.add((op.axes, op.reduction, dtype, copy_of(op)), op)
        for members in buckets.close():
            merge_group(members)
