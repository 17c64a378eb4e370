"""merge-collectives: fewer, larger messages."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir import dist
from shardweave.ir.program import Program
from shardweave.ir.types import dtype_of_value
from shardweave.passes.buckets import Buckets, join

_KiB = 1024


@dataclass(frozen=True)
class MergeCollectivesPass(ModulePass):
    """Join all-reduces over the same axes into one message with several operands.

    An all-reduce joins the open bucket of its axes, reduction, dtype and sub-batch; the bucket
    is sent where its last member stood, so a member's result is available later, never earlier.
    It closes when some member's result is first used, or when it would exceed `bucket_bytes`
    (default 25 MiB). Gradients, used by nothing but the return, so become one message per
    bucket.

    Requires: a local program. Ensures: numerics unchanged; at most as many messages. Linear.
    """

    name = "merge-collectives"
    bucket_bytes: int = 25 * _KiB * _KiB

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        program = Program(op)
        buckets = Buckets(self.bucket_bytes)
        for one in [*program.ops, program.return_op]:
            buckets.close_before(one)
            if type(one) is dist.AllReduceOp:
                copy = one.properties.get("copy")
                dtype = dtype_of_value(one.operands[0])
                buckets.add((one.axes, one.reduction, dtype, copy), one)
        for members in buckets.close():
            join(members)
