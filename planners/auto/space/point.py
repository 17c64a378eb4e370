"""A point of the search space: a value for each dimension of a parallel training step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.messages.bucket_collectives import ALONE_BYTES
from shardweave.planners.megatron.planner import CONTEXT, EXPERT
from shardweave.planners.plan.zero import DATA_AXIS, REPLICA_AXIS
from shardweave.planners.schedules.schedules import find_schedule

MESH = ("replica", "data", "tensor", "context", "expert", "stages")
"""Dimensions whose product is the number of devices; changing one changes another."""

ORDERS = ("schedule", "pipeline", "chunks")
"""Dimensions for the orders of messages and of micro-batches, which are varied on points near the
best."""

BUCKETS = (ALONE_BYTES // 2**20, 32, 256)
"""Sizes in MiB from which a tensor is sent alone: the default of `bucket-collectives`, and larger
ones for many ranks, where starting a message takes longer than copying this much."""

BUCKETED = ("in-order", "list")
"""Schedules that join messages into buckets and prefetch weights."""

INTERLEAVED = "interleaved-1f1b"
"""The order of micro-batches for which a point chooses the number of stages per device."""


@dataclass(frozen=True)
class ReplicaCut:
    """Degrees that shard one replica of the model, apart from stages."""

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1

    def mesh(self, data: int | None = None, replica: int = 1) -> Mesh:
        """Mesh of the cut's axes, after axes of `replica` and `data` if they are given."""
        batch = {} if data is None else {DATA_AXIS: data}
        batch = {REPLICA_AXIS: replica, **batch} if replica > 1 else batch
        degrees = {EXPERT: self.expert, CONTEXT: self.context}
        others = {axis: size for axis, size in degrees.items() if size > 1}
        return Mesh(**batch, **others, tensor=self.tensor)


@dataclass(frozen=True)
class JointPoint:
    """A way to train a step. To add a dimension, add a field here and its values in `space`.

    replica, data, tensor, context, expert, stages: degrees whose product is the number of devices.
    context shards sequences; expert shards the weights of experts, and the batch elsewhere.
    zero: ZeRO stage, which shards over `data` and, except parameters of experts, over `expert`;
    ranks that differ in `replica` hold the same shards (hybrid sharding).
    micro_batches: number per replica and step, run one after another. sub_batches: number per
    micro-batch, interleaved. recompute, schedule: options of passes `rematerialize` and
    `overlap-communication`. pipeline: the order of micro-batches, if there are stages or several
    micro-batches. buckets: MiB from which a weight or a gradient travels alone. chunks: stages per
    device under `interleaved-1f1b`; other orders fix this number. recompute_layers: number of
    leading blocks of each stage that policy `layer` recomputes; 0: all (Megatron-LM's
    `--recompute-num-layers`). loss_chunks: chunks of the loss along tokens, used without
    micro-batches, whose schedules keep logits until the backward pass. offload: values for
    the backward pass, optimizer states or both (`OFFLOAD`), which the host keeps. decompose:
    whether sequence-parallel products compute block by block while blocks travel.
    """

    replica: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    stages: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    recompute: str = "none"
    micro_batches: int = 1
    sub_batches: int = 1
    schedule: str = "in-order"
    pipeline: str = "1f1b"
    buckets: int = BUCKETS[0]
    chunks: int = find_schedule(INTERLEAVED).chunks
    recompute_layers: int = 0
    loss_chunks: int = 1
    offload: str = "none"
    decompose: bool = False

    @property
    def pieces(self) -> int:
        """Number of pieces into which devices, micro-batches and sub-batches split the batch."""
        return self.replicas * self.micro_batches * self.sub_batches

    @property
    def replicas(self) -> int:
        """Number of devices that the batch is sharded over."""
        return self.replica * self.data * self.expert

    @property
    def within(self) -> int:
        """Number of devices that share one sample's work within a stage."""
        return self.tensor * self.context

    @property
    def cut(self) -> ReplicaCut:
        return ReplicaCut(self.tensor, self.sequence_parallel, self.context, self.expert)

    @property
    def stages_each(self) -> int:
        """Number of stages on a device."""
        return self.chunks if self.pipeline == INTERLEAVED else find_schedule(self.pipeline).chunks

    @property
    def is_staged(self) -> bool:
        """True if a step has stages or micro-batches, so that it follows a schedule table."""
        return self.stages > 1 or self.micro_batches > 1

    @property
    def has_order(self) -> bool:
        """True if the order of micro-batches makes a difference, or is the default."""
        return self.micro_batches > 1 or self.pipeline == JointPoint.pipeline

    @property
    def joins_messages(self) -> bool:
        """True if weights and gradients are communicated in buckets, so that their size matters: if
        the plan has one stage, several replicas or context shards, and a schedule in `BUCKETED`."""
        summed = self.replicas * self.context
        return self.schedule in BUCKETED and summed > 1 and self.stages == 1

    def chooses(self, dimension: str) -> bool:
        """True if the value of a dimension makes a difference for this point."""
        if dimension == "pipeline":
            return self.stages > 1
        if dimension == "chunks":
            return self.stages > 1 and self.pipeline == INTERLEAVED
        if dimension == "recompute_layers":
            return self.recompute == "layer"
        if dimension == "loss_chunks":
            return not self.is_staged
        if dimension == "decompose":
            return self.sequence_parallel and self.tensor > 1
        return dimension != "buckets" or self.joins_messages

    def value(self, dimension: str) -> str:
        """Value of a dimension as text, as a user writes it."""
        chosen = getattr(self, dimension)
        return str(chosen).lower() if isinstance(chosen, bool) else str(chosen)

    def with_value(self, **values: object) -> JointPoint:
        """Copy the point with other values; faster than `dataclasses.replace`."""
        return JointPoint(**{**vars(self), **values})  # pyright: ignore[reportArgumentType]

    def changed_from(self, other: JointPoint) -> set[str]:
        """Dimensions in which two points differ, except `ORDERS`; degrees count as "mesh"."""
        mine, theirs = vars(self), vars(other)
        changed = {n for n in DIMENSIONS if n not in ORDERS and mine[n] != theirs[n]}
        return {"mesh" if name in MESH else name for name in changed}

    def __str__(self) -> str:
        """The degrees, then the values that differ from the defaults: `data=8, recompute layer`."""
        words = [",".join(f"{axis}={getattr(self, axis)}" for axis in MESH if self._is_told(axis))]
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"zero {self.zero}"] if self.zero else []
        words += [f"recompute {self._recomputed}"] if self.recompute != "none" else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += [f"{self.sub_batches} sub-batches"] if self.sub_batches > 1 else []
        words += [f"loss in {self.loss_chunks} chunks"] if self.loss_chunks > 1 else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += ["decomposed products"] if self.decompose else []
        words += [self.schedule]
        words += [self.pipeline] if self.stages > 1 else []
        words += [f"{self.chunks} chunks"] if self.chunks != JointPoint.chunks else []
        words += [f"buckets of {self.buckets} MiB"] if self.buckets != BUCKETS[0] else []
        return ", ".join(words)

    @property
    def _recomputed(self) -> str:
        """The policy, or the number of recomputed layers: `3 layers`, `3 layers of each stage`."""
        if not self.recompute_layers:
            return self.recompute
        count = f"{self.recompute_layers} layer{'s' if self.recompute_layers > 1 else ''}"
        return f"{count} of each stage" if self.stages > 1 else count

    def _is_told(self, axis: str) -> bool:
        return axis in ("data", "tensor") or getattr(self, axis) > 1


DIMENSIONS = tuple(f.name for f in fields(JointPoint))
"""The dimensions' names, in order."""


def plainness(point: JointPoint) -> tuple[int, str]:
    """Sort key for ties: number of values, mesh aside, that differ from defaults; then the name."""
    usual = JointPoint()
    odd = sum(point.value(name) != usual.value(name) for name in DIMENSIONS if name not in MESH)
    return odd, str(point)
