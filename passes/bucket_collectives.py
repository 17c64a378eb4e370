from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.rewrite.gradient_buckets import bucket_gradients
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class BucketCollectivesPass(PassOnProgram):
    """Join the reductions of gradients into messages of at most `bytes`, in order of production.

    All-reduces and reduce-scatters of which only the return reads the results, as gradients, are
    joined per axes, dtype and sub-batch. A bucket is sent as soon as its last gradient is made,
    so that with `start-collectives` it travels beside the rest of the backward pass; messages
    that `merge-collectives` made longer are cut again. A single gradient above `bytes` (default
    25 MiB) is sent alone. Reduce-scatters of any dims go as rows, one for each rank, of one
    matrix: joining them costs a copy.

    Requires: a local program before `start-collectives`. Ensures: numerics unchanged. Linear.
    """

    name = "bucket-collectives"
    bytes: int = 25 * 2**20

    def run(self, program: Program) -> None:
        if not bucket_gradients(program, self.bytes):
            note(
                "no gradient is reduced on its own; run it behind insert-collectives and before "
                "start-collectives, on a program whose batch is sharded."
            )
