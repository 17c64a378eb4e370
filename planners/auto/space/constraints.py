"""A user's constraints on a plan: dimensions that are fixed, and values that are forbidden."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.auto.space.point import BUCKETS, DIMENSIONS, INTERLEAVED, JointPoint
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import gib, memory_size
from shardweave.planners.megatron.planner import CONTEXT, EXPERT
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import (
    OFFLOAD,
    PIPELINE_SCHEDULES,
    RECOMPUTE,
    SCHEDULES,
    PlanError,
)
from shardweave.planners.plan.zero import DATA_AXIS, REPLICA_AXIS
from shardweave.planners.schedules.schedules import find_schedule

WORDS: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("false", "true"),
    "zero": ("0", "1", "2", "3"),
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
    "decompose": ("false", "true"),
    "schedule": tuple(filter(None, SCHEDULES)),
    "pipeline": PIPELINE_SCHEDULES,
}
"""Allowed values of dimensions whose values are words."""


@dataclass(frozen=True)
class Constraints:
    """A user's constraints. fixed: value by dimension. forbidden: values by dimension; they exclude
    only points to which the dimension matters (forbidding `pipeline=1f1b` keeps one stage)."""

    fixed: Mapping[str, str] = field(default_factory=dict[str, str])
    forbidden: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    @staticmethod
    def parse(fix: str, forbid: str) -> Constraints:
        """Parse text such as `tensor=8,zero=1`. Raises PlanError for unknown names and values."""
        fixed: dict[str, str] = {}
        for name, value in _pairs("fix", fix):
            if fixed.setdefault(name, value) != value:
                raise PlanError(f"fix: {name} is both {fixed[name]} and {value}; keep one of them.")
        forbidden: dict[str, set[str]] = {}
        for name, value in _pairs("forbid", forbid):
            forbidden.setdefault(name, set()).add(value)
        for name, value in fixed.items():
            if value in forbidden.get(name, ()):
                raise PlanError(f"{name}={value} is both fixed and forbidden; remove one of them.")
        return Constraints(fixed, {name: frozenset(values) for name, values in forbidden.items()})

    @property
    def names(self) -> frozenset[str]:
        """Names of all dimensions with a fixed or forbidden value."""
        return frozenset((*self.fixed, *self.forbidden))

    def allows(self, point: JointPoint, dimensions: Collection[str] = DIMENSIONS) -> bool:
        """True if a point meets the constraints on `dimensions`."""
        return all(
            point.value(name) == value for name, value in self.fixed.items() if name in dimensions
        ) and not any(
            point.value(name) in values and point.chooses(name)
            for name, values in self.forbidden.items()
            if name in dimensions
        )

    def allows_value(self, name: str, value: object) -> bool:
        """True if a dimension may have this value, regardless of other dimensions."""
        word = str(value).lower() if isinstance(value, bool) else str(value)
        return self.fixed.get(name, word) == word and word not in self.forbidden.get(name, ())

    def without(self, name: str) -> Constraints:
        """Copy the constraints without those on dimension `name`."""
        return Constraints(
            {n: value for n, value in self.fixed.items() if n != name},
            {n: values for n, values in self.forbidden.items() if n != name},
        )

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.fixed.items()]
        words += [
            f"not {name}={value}"
            for name, values in self.forbidden.items()
            for value in sorted(values)
        ]
        return ", ".join(words)


def _pairs(option: str, text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in filter(None, (piece.strip() for piece in text.replace(";", ",").split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in DIMENSIONS:
            hint = "" if name in DIMENSIONS else did_you_mean(name, DIMENSIONS)
            raise PlanError(
                f"{option}: found '{part}', expected DIMENSION=VALUE; "
                f"{hint}the dimensions are {', '.join(DIMENSIONS)}."
            )
        words = WORDS.get(name)
        if words is not None and value not in words:
            raise PlanError(
                f"{option}: {name} '{value}' is unknown; use one of {', '.join(words)}."
            )
        if words is None and not (value.isdigit() and int(value) >= 1):
            raise PlanError(f"{option}: {name} is '{value}', expected a whole number of 1 or more.")
        pairs.append((name, value if words else str(int(value))))
    return pairs


def with_memory(cluster: Cluster, memory: str) -> Cluster:
    """Limit each device's memory, such as "70GiB". Raises PlanError for a bad or larger size."""
    if not memory:
        return cluster
    try:
        size = memory_size(memory)
    except ValueError as error:
        raise PlanError(str(error)) from None
    for device in cluster.devices.values():
        if size > device.memory_bytes:
            raise PlanError(
                f"memory is {memory}, more than the {gib(device.memory_bytes)} GiB of device "
                f"'{device.name}' of cluster '{cluster.name}'; give less, or leave the option "
                "out."
            )
    devices = {name: replace(d, memory_bytes=int(size)) for name, d in cluster.devices.items()}
    return replace(cluster, devices=devices)


def point_of(plan: Plan) -> JointPoint:
    """Derive a point from a plan's fields. The number of chunks is the schedule's default, except
    for `interleaved-1f1b`, where stages and mesh give it."""
    pipeline = plan.pipeline
    schedule = pipeline.schedule if pipeline else PIPELINE_SCHEDULES[0]
    chunks = find_schedule(schedule).chunks
    if schedule == INTERLEAVED:
        chunks = max(1, plan.num_stages // Mesh(**plan.mesh).num_stages)
    tensor = 1
    for axis, size in plan.mesh.items():
        if axis.partition(".")[0] == "tensor" or axis in ("x", "y"):
            tensor *= size
    replica, data, zero = plan.mesh.get(REPLICA_AXIS, 1), plan.mesh.get(DATA_AXIS, 1), plan.zero
    if plan.mesh.get("z", 1) > 1:
        # AxoNN stores weights in shards over z, and further replicas are on its data axis.
        replica, data, zero = replica * data, plan.mesh["z"], 3
    return JointPoint(
        replica=replica,
        data=data,
        tensor=tensor,
        context=plan.mesh.get(CONTEXT, 1),
        expert=plan.mesh.get(EXPERT, 1),
        stages=max(1, plan.num_stages // chunks),
        sequence_parallel=plan.planner == "auto" and bool(plan.activations),
        zero=zero,
        recompute=plan.recompute,
        micro_batches=pipeline.micro_batches if pipeline else 1,
        sub_batches=plan.batch_split,
        schedule=plan.schedule or "in-order",
        pipeline=schedule,
        buckets=plan.alone_bytes // 2**20 or BUCKETS[0],
        chunks=chunks if schedule == INTERLEAVED else JointPoint.chunks,
        recompute_layers=_recomputed_layers(plan),
        loss_chunks=plan.loss_chunks,
        offload=plan.offload,
        decompose=bool(plan.decompose),
    )


def _recomputed_layers(plan: Plan) -> int:
    """Most blocks that the plan recomputes in any stage; 0 if it names none, which means all."""
    stages = plan.pipeline.stages if plan.pipeline else ()
    if len(stages) < 2:
        return len(plan.recompute_in)
    chosen = set(plan.recompute_in)
    return max(len(chosen.intersection(names)) for names in stages)
