"""Candidate sizes for dimensions of the search space, for a program on a cluster."""

from __future__ import annotations

from shardweave.planners.auto.reader import CostReader
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.cuts import MANY_DEVICES
from shardweave.planners.auto.space.point import BUCKETS, JointPoint
from shardweave.planners.cost.degrees import divisors

MOST_SHARDS = 3
"""Most sizes of ZeRO's groups to try on many devices: one node, and two and four times as many
devices; smaller groups have shorter messages."""

CHUNKS = (JointPoint.chunks, 4, 8)
"""Candidate numbers of stages per device for deep models: doubling the number halves the time to
fill the pipeline, and doubles the messages."""


def chunks_of(reader: CostReader, constraints: Constraints) -> tuple[int, ...]:
    """Candidate numbers of stages per device, for schedules that allow several."""
    asked = constraints.fixed.get("chunks")
    if asked is not None:
        return (int(asked),)
    return CHUNKS if reader.depths.is_deep else CHUNKS[:1]


def buckets_of(reader: CostReader, constraints: Constraints) -> tuple[int, ...]:
    """Candidate bucket sizes in MiB: the default, and larger ones below all parameters' bytes."""
    asked = constraints.fixed.get("buckets")
    if asked is not None:
        return (int(asked),)
    total = sum(reader.parameter_bytes)
    return tuple(n for n in BUCKETS if n == BUCKETS[0] or n * 2**20 < total)


def shard_sizes(replicas: int, inside: int, devices: int, node: int) -> list[int]:
    """Candidate numbers of replicas that ZeRO shards over, all of them first.

    replicas: number of replicas of a stage, each of `inside` neighbouring devices. With many
    devices, only groups that fill nodes are tried, so that their messages stay in few nodes.
    """
    sizes = [n for n in divisors(replicas) if 1 < n < replicas]
    if devices >= MANY_DEVICES:
        filling = [n for n in sizes if n * inside % node == 0]
        sizes = filling[:MOST_SHARDS]
    return [replicas, *reversed(sizes)]
