"""merge-collectives: fewer, larger messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Attribute, Operation
from xdsl.passes import ModulePass

from shardweave.ir import dist
from shardweave.ir.program import Program
from shardweave.ir.syntax import annotate
from shardweave.ir.types import dtype_of_value, num_bytes, tensor_type_of

_KiB = 1024


@dataclass
class _Bucket:
    """All-reduces to be made one, and their bytes."""

    members: list[dist.DistOp]
    size: int = 0


@dataclass(frozen=True)
class MergeCollectivesPass(ModulePass):
    """Join all-reduces over the same axes into one message with several operands.

    An all-reduce joins the open bucket of its axes, reduction, dtype and sub-batch; the bucket is sent
    where its last member stood, so a member's result is available later, never earlier. It
    closes when some member's result is first used, or when it would exceed `bucket_bytes`
    (default 25 MiB). Gradients, used by nothing but the return, so become one message per
    bucket.

    Requires: a local program. Ensures: numerics unchanged; at most as many messages. Linear.
    """

    name = "merge-collectives"
    bucket_bytes: int = 25 * _KiB * _KiB

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        open_buckets: dict[tuple[object, ...], _Bucket] = {}
        finished: list[_Bucket] = []
        for one in [*program.ops, program.return_op]:
            _close_used(open_buckets, finished, one)
            if isinstance(one, dist.AllReduceOp):
                self._join(open_buckets, finished, one)
        for bucket in [*finished, *open_buckets.values()]:
            if len(bucket.members) > 1:
                _merge(bucket.members)

    def _join(
        self,
        open_buckets: dict[tuple[object, ...], _Bucket],
        finished: list[_Bucket],
        one: dist.AllReduceOp,
    ) -> None:
        copy = one.properties.get("copy")
        key = (one.axes, one.reduction, dtype_of_value(one.operands[0]), copy)
        size = sum(num_bytes(tensor_type_of(v)) for v in one.operands)
        bucket = open_buckets.get(key)
        if bucket is not None and bucket.size + size > self.bucket_bytes:
            finished.append(open_buckets.pop(key))
            bucket = None
        if bucket is None:
            bucket = open_buckets[key] = _Bucket([])
        bucket.members.append(one)
        bucket.size += size


def _close_used(
    open_buckets: dict[tuple[object, ...], _Bucket], finished: list[_Bucket], user: Operation
) -> None:
    """Close the buckets of which `user` needs a result."""
    producers = {operand.owner for operand in user.operands}
    for key, bucket in list(open_buckets.items()):
        if any(member in producers for member in bucket.members):
            finished.append(open_buckets.pop(key))


def _merge(members: list[dist.DistOp]) -> None:
    last = members[-1]
    operands = [v for member in members for v in member.operands]
    properties = {
        name: value
        for name, value in last.properties.items()
        if name in ("axes", "op", "phase", "copy")
    }
    merged = type(last).create(
        operands=operands,
        result_types=[v.type for v in operands],
        properties=properties,
    )
    annotate(merged, last)
    merged.properties["layer"] = builtin.StringAttr("")
    _join_shardings(merged, members)
    block = last.parent_block()
    assert block is not None
    block.insert_op_before(merged, last)
    results = iter(merged.results)
    for member in members:
        for old in member.results:
            new = next(results)
            new.name_hint = old.name_hint
            old.replace_all_uses_with(new)
        member.detach()
        member.erase()


def _join_shardings(merged: Operation, members: Iterable[Operation]) -> None:
    entries: list[Attribute] = []
    for member in members:
        known = member.properties.get("sharding")
        if not isinstance(known, builtin.ArrayAttr):
            return
        entries.extend(known.data)  # pyright: ignore
    merged.properties["sharding"] = builtin.ArrayAttr(entries)
