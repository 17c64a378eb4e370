"""Sizes that dimensions of the joint space may have, of a program on a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardweave.ir.mesh import Mesh
from shardweave.planners.auto.constraints import Constraints
from shardweave.planners.auto.point import BUCKETS, JointPoint, ReplicaCut
from shardweave.planners.auto.reader import CostReader
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.degrees import asked_degrees, divisors
from shardweave.planners.megatron import CONTEXT
from shardweave.planners.plan_parts import PlanError

MESH_AXES = ("data", "tensor", CONTEXT, "pipeline", "stage")
"""The axes of a mesh that a user may ask for."""

CHUNKS = (JointPoint.chunks, 4, 8)
"""Into how many stages a deep model's part of a device may be cut: each halves what filling the
pipeline takes, and doubles the messages."""

MANY_DEVICES = 64
"""From here on tensor parallelism stays within nodes: its messages, two for each block and pass,
are too many for a network, and each degree is another partition to read."""


def chunks_of(reader: CostReader, constraints: Constraints) -> tuple[int, ...]:
    """Into how many stages what a device has may be cut where a schedule has a choice."""
    asked = constraints.fixed.get("chunks")
    if asked is not None:
        return (int(asked),)
    return CHUNKS if reader.depths.is_deep else CHUNKS[:1]


def contexts_of(devices: int, mesh: Mesh | None, constraints: Constraints) -> Iterator[int]:
    """Sizes that an axis of sequences may have, from the smallest."""
    for size in divisors(devices):
        asked = (
            size if mesh is None else asked_degrees(mesh, MESH_AXES, "auto", PlanError).get(CONTEXT)
        )
        if size > 1 and size == asked and constraints.allows_value(CONTEXT, size):
            yield size


def cuts_context(reader: CostReader, size: int) -> bool:
    """Whether an axis of sequences of that size cuts anything."""
    plan = reader.base(reader.depths.read, 1, ReplicaCut(context=size))
    return f'"{CONTEXT}"' in "".join((*plan.inputs.values(), *plan.parameters.values()))


def buckets_of(reader: CostReader, constraints: Constraints) -> tuple[int, ...]:
    """Sizes that join different messages: none is larger than all parameters together."""
    asked = constraints.fixed.get("buckets")
    if asked is not None:
        return (int(asked),)
    total = sum(reader.parameter_bytes)
    return tuple(n for n in BUCKETS if n == BUCKETS[0] or n * 2**20 < total)


def tensor_degrees(cluster: Cluster) -> list[int]:
    """Degrees of tensor parallelism to look at."""
    inside = math.gcd(*(node.devices for node in cluster.nodes))
    degrees = divisors(cluster.num_devices)
    if cluster.num_devices >= MANY_DEVICES:
        degrees = [n for n in degrees if n <= inside]
    return degrees
