"""Which messages of weights and gradients travel together, and which alone."""

from __future__ import annotations

from shardweave.ir.program import Program
from shardweave.ir.rewrite.buckets import BUCKET_BYTES
from shardweave.ir.rewrite.gradient_buckets import bucket_gradients
from shardweave.ir.rewrite.weight_buckets import bucket_weights

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
