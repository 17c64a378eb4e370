"""Which messages of weights and gradients travel together, and which alone."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program.program import Program
from shardweave.passes.messages.gradient_buckets import bucket_gradients
from shardweave.passes.messages.merge_collectives import BUCKET_BYTES
from shardweave.passes.messages.weight_buckets import bucket_weights
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

FIRST_BYTES = 2**20
"""The first bucket is small, so that the link has work early in the backward pass."""

ALONE_BYTES = 2**21
"""From here on, copying a tensor into a message and out of it takes longer than a message of its
own: with gloo one takes 0.7 ms of a core, and a copy of this size as much."""


def bucket_collectives(
    program: Program,
    bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BYTES,
    alone_bytes: int = ALONE_BYTES,
) -> int:
    """Bucket the gathers of stored weights and the reductions of gradients. Linear.

    Returns how many of both there were. Raises ValueError for sizes below one byte.
    """
    for name, size in (
        ("bytes", bytes),
        ("first_bytes", first_bytes),
        ("alone_bytes", alone_bytes),
    ):
        if size < 1:
            raise ValueError(f"{name}={size}; give at least 1 byte.")
    weights = bucket_weights(program, bytes, alone_bytes)
    return weights + bucket_gradients(program, bytes, first_bytes, alone_bytes)


@dataclass(frozen=True)
class BucketCollectivesPass(PassOnProgram):
    """Join the messages of small weights and gradients, and let large ones travel alone.

    Reductions of which only the return reads the results, as gradients, are joined per axes, dtype
    and sub-batch, in order of production, and are sent as soon as the last is made, so that with
    `start-collectives` they travel beside the rest of the backward pass; messages that
    `merge-collectives` made longer are cut again. The first bucket has at most `first_bytes`
    (default 1 MiB), each later one twice as much, up to `bytes` (default 25 MiB); sums that a
    function is given fill buckets from the first on. Gathers of parameters that are stored in
    shards are joined per block, axes and dtype, in runs of at most `bytes`, where the first is
    read; what the forward pass gathers last is kept if the backward
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
