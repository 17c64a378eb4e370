from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.buckets import BUCKET_BYTES, merge_all_reduces
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class MergeCollectivesPass(PassOnProgram):
    """Join all-reduces over the same axes into one message with several operands.

    An all-reduce joins the open bucket of its axes, reduction, dtype and sub-batch; the bucket
    is sent where its last member stood, so a member's result is available later, never earlier.
    It closes when some member's result is first used, or when it would exceed `bucket_bytes`
    (default 25 MiB). Gradients, used by nothing but the return, so become one message per
    bucket.

    Requires: a local program. Ensures: numerics unchanged; at most as many messages. Linear.
    """

    name = "merge-collectives"
    bucket_bytes: int = BUCKET_BYTES

    def run(self, program: Program) -> None:
        merge_all_reduces(program, self.bucket_bytes)
