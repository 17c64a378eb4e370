"""The joint space: every point that a cluster's devices and a program's batch and blocks allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from shardweave.ir.mesh import Mesh
from shardweave.planners.auto.constraints import Constraints
from shardweave.planners.auto.point import JointPoint
from shardweave.planners.auto.reader import CostReader
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.pipeline.stages import OVERLAPPING
from shardweave.planners.degrees import asked_degrees, divisors
from shardweave.planners.pipelines.schedules import find_schedule
from shardweave.planners.plan_parts import PIPELINE_SCHEDULES, RECOMPUTE, PlanError
from shardweave.planners.predict import BY_BLOCK

SUB_BATCHES = (1, 2, 4)
MANY_DEVICES = 64
"""From here on tensor parallelism stays within nodes: its messages, two for each block and pass,
are too many for a network, and each degree is another partition to read."""

SCHEDULES = ("in-order", "cross-pass", "sub-batch", "blocking")
"""Schedules of messages; `list`, the longest to compute, is tried on the best alone."""


@dataclass(frozen=True)
class JointSpace:
    """What may be chosen.

    devices, node: how many there are, and in a node. batch: samples. parts: where stages may be
    cut, and one more. tensor: degrees that divide anything; cuts_sequence: those of them that can
    cut a sequence. mesh: what a user's mesh asks for, by axis. has_list: whether schedules `list`
    can be named.
    """

    devices: int
    node: int
    batch: int
    parts: int
    tensor: tuple[int, ...]
    cuts_sequence: frozenset[int]
    constraints: Constraints
    mesh: Mesh | None = None
    has_list: bool = True

    def points(self) -> Iterator[JointPoint]:
        """All points, with the schedule that suits their sub-batches and pipeline 1f1b.

        Schedules and orders of micro-batches are `variants` of these.
        """
        for data, tensor, stages in self._degrees():
            rows = self.batch // data
            sequences = (False, True) if tensor in self.cuts_sequence else (False,)
            for micro in divisors(rows):
                if not self._may("micro_batches", micro):
                    continue
                zeros = _zeros(data, micro)
                subs = [n for n in SUB_BATCHES if rows // micro % n == 0]
                for sequence, zero, recompute, sub in product(sequences, zeros, RECOMPUTE, subs):
                    point = JointPoint(data, tensor, stages, sequence, zero, recompute, micro, sub)
                    found = self._usual(point)
                    if found is not None:
                        yield found

    def _usual(self, point: JointPoint) -> JointPoint | None:
        """The point with the first schedules that the user allows; None if it is not allowed."""
        first = "cross-pass" if point.sub_batches > 1 else "in-order"
        schedule = next(filter(partial(self._may, "schedule"), (first, *self._schedules)), None)
        names = PIPELINE_SCHEDULES if point.stages > 1 else PIPELINE_SCHEDULES[:1]
        pipeline = next(filter(partial(self._may, "pipeline"), names), None)
        if schedule is None or pipeline is None:
            return None
        found = point.with_value(schedule=schedule, pipeline=pipeline)
        return found if self.constraints.allows(found) else None

    @property
    def _schedules(self) -> tuple[str, ...]:
        return (*SCHEDULES, *(("list",) if self.has_list else ()))

    def variants(self, point: JointPoint) -> Iterator[JointPoint]:
        """The point under each order of messages and of micro-batches, if the user allows it.

        Steps that are simulated by block (`predict.BY_BLOCK`) know two orders of messages: those
        that run beside compute, and those that are waited for. The first of each stands for all.
        """
        seen: set[tuple[str, bool]] = set()
        pipelines = PIPELINE_SCHEDULES if point.stages > 1 else PIPELINE_SCHEDULES[:1]
        for schedule, pipeline in product(self._schedules, pipelines):
            found = point.with_value(schedule=schedule, pipeline=pipeline)
            if not (self.constraints.allows(found) and self.is_possible(found)):
                continue
            if found.is_staged and pipeline in BY_BLOCK:
                kind = pipeline, schedule in OVERLAPPING
                if kind in seen:
                    continue
                seen.add(kind)
            yield found

    def is_possible(self, point: JointPoint) -> bool:
        """Whether there is a table for the micro-batches, and sub-batches for the schedule."""
        if point.schedule == "sub-batch" and point.sub_batches == 1:
            return False
        if point.pipeline == "list" and not self.has_list:
            return False
        if point.stages == 1:
            return point.pipeline == PIPELINE_SCHEDULES[0]
        chosen = find_schedule(point.pipeline)
        if point.stages * chosen.chunks > self.parts:
            return False
        try:
            chosen.table(point.stages, point.micro_batches, chosen.chunks)
        except ValueError:
            return False
        return True

    def _degrees(self) -> Iterator[tuple[int, int, int]]:
        for tensor in self.tensor:
            for stages in divisors(self.devices // tensor):
                data = self.devices // tensor // stages
                if (
                    stages > self.parts
                    or self.batch % data
                    or not self._has_mesh(data, tensor, stages)
                ):
                    continue
                sizes = {"data": data, "tensor": tensor, "stages": stages}
                if all(self._may(name, size) for name, size in sizes.items()):
                    yield data, tensor, stages

    def _has_mesh(self, data: int, tensor: int, stages: int) -> bool:
        if self.mesh is None:
            return True
        asked = asked_degrees(self.mesh, ("data", "tensor", "pipeline", "stage"), "auto", PlanError)
        depth = asked.get("pipeline", asked.get("stage", 1))
        return (asked.get("data", 1), asked.get("tensor", 1), depth) == (data, tensor, stages)

    def _may(self, name: str, value: object) -> bool:
        return self.constraints.allows_value(name, value)


def _zeros(data: int, micro_batches: int) -> Sequence[int]:
    """ZeRO stages that differ: without micro-batches 2 is 1."""
    if data == 1:
        return (0,)
    return (0, 1, 2, 3) if micro_batches > 1 else (0, 1, 3)


def joint_space(
    reader: CostReader, mesh: Mesh | None, constraints: Constraints, *, has_list: bool = True
) -> JointSpace:
    """The space of a program on its cluster, or on the devices of `mesh`.

    has_list: whether plans can name the cluster, which schedules `list` need. Raises ClusterError
    for a mesh of more devices than there are.
    """
    program, cluster = reader.depths.read, reader.cluster
    devices = cluster.num_devices if mesh is None else mesh.num_devices
    cluster.check_fits(devices)
    degrees: list[int] = []
    cuts: set[int] = set()
    for tensor in tensor_degrees(cluster):
        if tensor > 1:
            plan = reader.base(program, 1, tensor, True)
            if not plan.parameters:
                continue
            cuts |= {tensor} if plan.activations else set()
        degrees.append(tensor)
    repeated = len(reader.depths.names)
    rest = len(reader.cost(1, False, 1).blocks) - repeated if repeated else 0
    return JointSpace(
        devices=devices,
        node=cluster.nodes[0].devices,
        batch=reader.batch,
        parts=repeated + rest,
        tensor=tuple(degrees),
        cuts_sequence=frozenset(cuts),
        constraints=constraints,
        mesh=mesh,
        has_list=has_list,
    )


def tensor_degrees(cluster: Cluster) -> list[int]:
    """Degrees of tensor parallelism to look at."""
    inside = math.gcd(*(node.devices for node in cluster.nodes))
    degrees = divisors(cluster.num_devices)
    if cluster.num_devices >= MANY_DEVICES:
        degrees = [n for n in degrees if n <= inside]
    return degrees
