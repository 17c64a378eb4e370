from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.bucket_collectives import (
    ALONE_BYTES,
    FIRST_BYTES,
    bucket_collectives,
)
from shardweave.ir.rewrite.buckets import BUCKET_BYTES
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class BucketCollectivesPass(PassOnProgram):
    """Join the messages of small weights and gradients, and let large ones travel alone.

    Reductions of which only the return reads the results, as gradients, are joined per axes, dtype
    and sub-batch, in order of production, and are sent as soon as the last is made, so that with
    `start-collectives` they travel beside the rest of the backward pass; messages that
    `merge-collectives` made longer are cut again. The first bucket has at most `first_bytes`
    (default 1 MiB), each later one twice as much, up to `bytes` (default 25 MiB). Gathers of
    parameters that are stored in shards are joined per block, axes and dtype, in runs of at most
    `bytes`, where the first is read; what the forward pass gathers last is kept if the backward
    pass begins with it. A tensor of `alone_bytes` or more (default 2 MiB) needs no copy: it is
    sent from where it is, to where it is read.

    Joined all-reduces are one op of several operands. Joined gathers and reduce-scatters are rows,
    one for each rank, of one matrix.

    Requires: a local program before `start-collectives`, after `rematerialize`. Ensures: numerics
    unchanged; not more bytes. Linear.
    """

    name = "bucket-collectives"
    bytes: int = BUCKET_BYTES
    first_bytes: int = FIRST_BYTES
    alone_bytes: int = ALONE_BYTES

    def run(self, program: Program) -> None:
        if not bucket_collectives(program, self.bytes, self.first_bytes, self.alone_bytes):
            note(
                "no gradient is reduced on its own, and no weight gathered; run it behind "
                "insert-collectives and before start-collectives, on a program whose batch is "
                "sharded."
            )
