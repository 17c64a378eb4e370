"""The search space: every point that a cluster's devices and a program's batch and blocks allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.auto.reader import CostReader
from shardweave.planners.auto.space.constraints import Constraints
from shardweave.planners.auto.space.cuts import (
    MANY_DEVICES,
    MESH_AXES,
    ReplicaCuts,
    replica_cuts,
    tensor_degrees,
)
from shardweave.planners.auto.space.point import (
    BUCKETED,
    BUCKETS,
    INTERLEAVED,
    ORDERS,
    JointPoint,
    ReplicaCut,
)
from shardweave.planners.cost.degrees import asked_degrees, divisors
from shardweave.planners.megatron.planner import CONTEXT, EXPERT, why_not_one_by_one
from shardweave.planners.plan.plan_parts import (
    PAPERS_RECOMPUTE,
    PIPELINE_SCHEDULES,
    PRODUCTS,
    RECOMPUTE,
)
from shardweave.planners.plan.zero import BATCH_AXES
from shardweave.planners.schedules.schedules import find_schedule

SUB_BATCHES = (1, 2, 4)
SCHEDULES = ("in-order", "cross-pass", "sub-batch", "blocking")
"""Schedules of messages; `list`, which takes longest to compute, is tried only near the best."""

MOST_SHARDS = 3
"""Most sizes of ZeRO's groups to try on many devices: one node, and two and four times as many
devices; smaller groups have shorter messages."""

CHUNKS = (JointPoint.chunks, 4, 8)
"""Candidate numbers of stages per device for deep models: doubling the number halves the time to
fill the pipeline, and doubles the messages."""


@dataclass(frozen=True)
class JointSpace:
    """The choices for a plan.

    cuts: ways to shard a replica, with numbers of devices and samples. parts: most stages that
    blocks can be cut into. buckets: candidate bucket sizes in MiB. mesh: the user's mesh, if any.
    has_list: whether schedules `list` are tried (they need the cluster's name, and take long for
    deep models). whole: why the batch cannot be split into micro-batches; empty if it can. chunks:
    candidates for stages per device under `interleaved-1f1b`. layers: number of equal blocks that
    policy `layer` can choose from. node: greatest common divisor of the nodes' sizes.
    """

    cuts: ReplicaCuts
    parts: int
    constraints: Constraints
    buckets: tuple[int, ...] = BUCKETS[:1]
    mesh: Mesh | None = None
    has_list: bool = True
    whole: str = ""
    chunks: tuple[int, ...] = CHUNKS[:1]
    layers: int = 0
    node: int = 1

    @property
    def devices(self) -> int:
        return self.cuts.devices

    @property
    def batch(self) -> int:
        return self.cuts.batch

    def points(self) -> Iterator[JointPoint]:
        """Yield all points without a context axis, with one schedule that suits their sub-batches
        and order 1f1b of micro-batches.

        `variants` yields their other schedules and orders of micro-batches.
        """
        for tensor in self.cuts.tensor:
            for cut in self.cuts.plain(tensor):
                yield from self._points(cut)

    def sequence_points(self, tensor: int) -> Iterator[JointPoint]:
        """Yield the points with a tensor degree and a context axis."""
        for cut in self.cuts.of_sequences(tensor):
            yield from self._points(cut)

    def all_points(self) -> Iterator[JointPoint]:
        """Yield all points: first those without a context axis, then those with a context axis."""
        yield from self.points()
        for tensor in self.cuts.tensor:
            yield from self.sequence_points(tensor)

    def _points(self, cut: ReplicaCut) -> Iterator[JointPoint]:
        for replica, data, stages in self._degrees(cut):
            rows = self.batch // (replica * data * cut.expert)
            for micro in [1] if self.whole else divisors(rows):
                if not self._may("micro_batches", micro):
                    continue
                zeros = _zeros(replica, data * cut.expert, micro)
                chunks = int(self.constraints.fixed.get("loss_chunks", 1))
                offload = self.constraints.fixed.get("offload", JointPoint.offload)
                decompose = self.constraints.fixed.get("decompose") == "true"
                subs = [n for n in SUB_BATCHES if rows // micro % n == 0]
                policies = self._recomputed(stages)
                for zero, (recompute, layers), sub in product(zeros, policies, subs):
                    point = JointPoint(
                        replica, data, cut.tensor, cut.context, cut.expert, stages,
                        cut.sequence_parallel, zero, recompute, micro, sub, recompute_layers=layers,
                        loss_chunks=chunks, offload=offload, decompose=decompose,
                    )  # fmt: skip
                    usual = self._usual(point)
                    if usual is not None:
                        yield from self._with_buckets(usual)

    def _policies(self, stages: int) -> tuple[str, ...]:
        """Policies of recomputation. `after-products` is among them with stages, which hold values
        of many micro-batches, or if the user constrains the policy. Otherwise its estimates, which
        miss most of the exposed gathers of ZeRO, would rank it first; the search then tries it only
        as a variant of other points (`keeping_products`)."""
        asked = "recompute" in self.constraints.names
        return RECOMPUTE if stages > 1 or asked else PAPERS_RECOMPUTE

    def _recomputed(self, stages: int) -> list[tuple[str, int]]:
        """Policies with numbers of recomputed layers per stage: 0 for all, or the user's number."""
        asked = int(self.constraints.fixed.get("recompute_layers", 0))
        if asked:
            return [("layer", asked)]
        return [(name, 0) for name in self._policies(stages)]

    def keeping_products(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield the point with policy `after-products`, if `points` leaves it out. The policy keeps
        more than other policies that recompute, and less than no recomputation."""
        variant = point.with_value(recompute=PRODUCTS, recompute_layers=0)
        if self.leaves_out(variant) and self.constraints.allows(variant):
            yield variant

    def leaves_out(self, point: JointPoint) -> bool:
        """True if `points` leaves out the point's recomputation policy (see `_policies`)."""
        return point.recompute not in self._policies(point.stages)

    def could_cut_sequence(self, point: JointPoint) -> bool:
        """True if a point does not use sequence parallelism, but could."""
        is_other = point.tensor in self.cuts.cuts_sequence and not point.sequence_parallel
        return is_other and self._may("sequence_parallel", True)

    def _with_buckets(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield the point with each bucket size (the default if none matters) that is allowed."""
        for size in self.buckets if point.joins_messages else self.buckets[:1]:
            variant = point.with_value(buckets=size)
            if self.constraints.allows(variant):
                yield variant

    def _usual(self, point: JointPoint) -> JointPoint | None:
        """The point with the first possible and allowed schedule and order of micro-batches; None
        if there are none."""
        first = "cross-pass" if point.sub_batches > 1 else "in-order"
        point = point.with_value(schedule=first, buckets=self.buckets[0])
        if not self.constraints.names & {*ORDERS}:
            return point
        orders = (
            point.with_value(schedule=schedule, pipeline=pipeline, chunks=chunks)
            for schedule in filter(partial(self._may, "schedule"), (first, *self._schedules))
            for pipeline, chunks in self._orders(point)
        )
        allowed = (order for order in orders if self.constraints.allows(order, ORDERS))
        return next(filter(self.is_possible, allowed), None)

    def _orders(self, point: JointPoint) -> Iterator[tuple[str, int]]:
        """Yield (order of micro-batches, chunks); only `interleaved-1f1b` has several chunks."""
        for pipeline in PIPELINE_SCHEDULES if point.stages > 1 else PIPELINE_SCHEDULES[:1]:
            for chunks in self.chunks if pipeline == INTERLEAVED else CHUNKS[:1]:
                yield pipeline, chunks

    @property
    def _schedules(self) -> tuple[str, ...]:
        return (*SCHEDULES, *(("list",) if self.has_list else ()))

    def variants(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield the point under each allowed and possible schedule and order of micro-batches."""
        for schedule, (pipeline, chunks) in product(self._schedules, self._orders(point)):
            variant = point.with_value(schedule=schedule, pipeline=pipeline, chunks=chunks)
            if self.constraints.allows(variant) and self.is_possible(variant):
                yield variant

    def fewer_layers(self, point: JointPoint) -> list[JointPoint]:
        """Yield, for policy `layer`, the point with every smaller number of recomputed layers per
        stage, the smallest first."""
        most = point.recompute_layers or -(-self.layers // (point.stages * point.stages_each))
        variants = (point.with_value(recompute="layer", recompute_layers=n) for n in range(1, most))
        return [v for v in variants if self.constraints.allows(v) and self.is_possible(v)]

    def is_possible(self, point: JointPoint) -> bool:
        """True if the point's schedule, buckets, order of micro-batches and layers fit together."""
        if point.schedule == "sub-batch" and point.sub_batches == 1:
            return False
        if point.buckets != self.buckets[0] and point.schedule not in BUCKETED:
            return False
        if point.pipeline == "list" and not self.has_list:
            return False
        stages = point.stages * point.stages_each
        if point.recompute_layers and point.recompute_layers * stages >= self.layers:
            return False
        if point.stages == 1:
            return point.pipeline == PIPELINE_SCHEDULES[0]
        chosen = find_schedule(point.pipeline)
        if point.stages * point.stages_each > self.parts:
            return False
        try:
            chosen.table(point.stages, point.micro_batches, point.stages_each)
        except ValueError:
            return False
        return True

    def _degrees(self, cut: ReplicaCut) -> Iterator[tuple[int, int, int]]:
        """Yield the allowed (further replicas, size of the data axis, stages) for a cut."""
        inside = cut.tensor * cut.context * cut.expert
        rest = self.devices // inside
        for stages in divisors(rest):
            replicas = rest // stages
            if stages > self.parts or self.batch % (replicas * cut.expert):
                continue
            for data in self._shards(replicas, inside):
                replica = replicas // data
                sizes = {"replica": replica, "data": data, "stages": stages}
                sizes |= {"tensor": cut.tensor, CONTEXT: cut.context, EXPERT: cut.expert}
                if self._has_mesh(sizes) and all(self._may(n, size) for n, size in sizes.items()):
                    yield replica, data, stages

    def _shards(self, replicas: int, inside: int) -> list[int]:
        """Candidate numbers of a stage's replicas, each of `inside` neighbouring devices, over
        which ZeRO shards: all divisors if the user fixes the mesh or `replica`, else all replicas
        first. With many devices, only groups that fill nodes are tried, so that their messages stay
        in few nodes."""
        if "replica" in self.constraints.fixed or self.mesh is not None:
            return divisors(replicas)
        sizes = [n for n in divisors(replicas) if 1 < n < replicas]
        if self.devices >= MANY_DEVICES:
            sizes = [n for n in sizes if n * inside % self.node == 0][:MOST_SHARDS]
        return [replicas, *reversed(sizes)]

    def _has_mesh(self, sizes: Mapping[str, int]) -> bool:
        if self.mesh is None:
            return True
        asked = asked_degrees(self.mesh, MESH_AXES, "auto")
        depth = asked.get("pipeline", asked.get("stage", 1))
        degrees = {name: asked.get(name, 1) for name in (*BATCH_AXES, "tensor", CONTEXT, EXPERT)}
        return {**degrees, "stages": depth} == sizes

    def _may(self, name: str, value: object) -> bool:
        return self.constraints.allows_value(name, value)


def _zeros(replica: int, data: int, micro_batches: int) -> Sequence[int]:
    """ZeRO stages that differ. Without micro-batches stage 2 equals stage 1. With data=1 nothing is
    sharded; with further replicas too, the point equals one with data, so there is no stage."""
    stages = (1, 2, 3) if micro_batches > 1 else (1, 3)
    if replica > 1:
        return stages if data > 1 else ()
    return (0, *stages) if data > 1 else (0,)


def joint_space(
    reader: CostReader,
    mesh: Mesh | None,
    constraints: Constraints,
    *,
    has_list: bool = True,
    runnable: bool = True,
) -> JointSpace:
    """Build the search space of a program on its cluster, or on the devices of `mesh`.

    has_list: whether schedules `list` are tried; they need a name of the cluster. runnable: leave
    out micro-batches if the program cannot run them one by one. Raises ClusterError for a mesh with
    more devices than the cluster.
    """
    program, cluster = reader.depths.read, reader.cluster
    devices = cluster.num_devices if mesh is None else mesh.num_devices
    cluster.check_fits(devices)
    node = math.gcd(*(n.devices for n in cluster.nodes))
    largest = sum(reader.parameter_bytes)

    def fixed_or(name: str, usual: tuple[int, ...]) -> tuple[int, ...]:
        return (int(constraints.fixed[name]),) if name in constraints.fixed else usual

    return JointSpace(
        cuts=replica_cuts(
            partial(reader.base, program, 1),
            reader.batch,
            devices,
            tensor_degrees(cluster.num_devices, node),
            mesh,
            constraints,
        ),
        parts=len(reader.cost(ReplicaCut(), 1).blocks),
        buckets=fixed_or(
            "buckets", tuple(n for n in BUCKETS if n == BUCKETS[0] or n * 2**20 < largest)
        ),
        constraints=constraints,
        mesh=mesh,
        has_list=has_list,
        whole=why_not_one_by_one(program) if runnable else "",
        chunks=fixed_or("chunks", CHUNKS if reader.depths.is_deep else CHUNKS[:1]),
        layers=len(reader.depths.names),
        node=node,
    )
