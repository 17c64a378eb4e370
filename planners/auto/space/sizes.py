"""Sizes that dimensions of the joint space may have, of a program on a cluster."""

from __future__ import annotations

from shardweave.planners.auto.reader import CostReader
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.cuts import MANY_DEVICES
from shardweave.planners.auto.space.point import BUCKETS, JointPoint
from shardweave.planners.cost.degrees import divisors

MOST_SHARDS = 3
"""Sizes of a group of devices over which ZeRO divides that are looked at where devices are
many: one node's, and two and four times as many, among which each message is shorter."""

CHUNKS = (JointPoint.chunks, 4, 8)
"""Into how many stages a deep model's part of a device may be cut: each halves what filling the
pipeline takes, and doubles the messages."""


def chunks_of(reader: CostReader, constraints: Constraints) -> tuple[int, ...]:
    """Into how many stages what a device has may be cut where a schedule has a choice."""
    asked = constraints.fixed.get("chunks")
    if asked is not None:
        return (int(asked),)
    return CHUNKS if reader.depths.is_deep else CHUNKS[:1]


def buckets_of(reader: CostReader, constraints: Constraints) -> tuple[int, ...]:
    """Sizes that join different messages: none is larger than all parameters together."""
    asked = constraints.fixed.get("buckets")
    if asked is not None:
        return (int(asked),)
    total = sum(reader.parameter_bytes)
    return tuple(n for n in BUCKETS if n == BUCKETS[0] or n * 2**20 < total)


def shard_sizes(replicas: int, inside: int, devices: int, node: int) -> list[int]:
    """Over how many replicas ZeRO may divide, from all of them down.

    replicas: that a stage has, each of `inside` neighbouring devices. Of many devices sizes that
    fill nodes, so that messages of shards stay in one, or in a few.
    """
    sizes = [n for n in divisors(replicas) if 1 < n < replicas]
    if devices >= MANY_DEVICES:
        filling = [n for n in sizes if n * inside % node == 0]
        sizes = filling[:MOST_SHARDS]
    return [replicas, *reversed(sizes)]
