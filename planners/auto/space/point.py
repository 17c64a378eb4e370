"""One point of the joint space: a value for each dimension of how a step can be trained."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.messages.bucket_collectives import ALONE_BYTES
from shardweave.planners.megatron.planner import CONTEXT, EXPERT
from shardweave.planners.plan.zero import DATA_AXIS, REPLICA_AXIS
from shardweave.planners.schedules.schedules import find_schedule

MESH = ("replica", "data", "tensor", "context", "expert", "stages")
"""Dimensions whose product is the number of devices; a change of one changes another."""

ORDERS = ("schedule", "pipeline", "chunks")
"""Dimensions of which each is tried on points that are near the best: orders of messages and of
micro-batches."""

BUCKETS = (ALONE_BYTES // 2**20, 32, 256)
"""MiB from which on a tensor travels alone: as `bucket-collectives` has it, and where a message
of many ranks takes longer to begin than a copy of so much."""


BUCKETED = ("in-order", "list")
"""Schedules that join messages, and start those of weights before they are needed."""

INTERLEAVED = "interleaved-1f1b"
"""The order of micro-batches of which a point says how many stages a device has."""


@dataclass(frozen=True)
class ReplicaCut:
    """Cut of a replica, except its stages and its batch."""

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1

    def mesh(self, data: int | None = None, replica: int = 1) -> Mesh:
        """Its axes, behind those of replicas if they are given."""
        batch = {} if data is None else {DATA_AXIS: data}
        batch = {REPLICA_AXIS: replica, **batch} if replica > 1 else batch
        degrees = {EXPERT: self.expert, CONTEXT: self.context}
        others = {axis: size for axis, size in degrees.items() if size > 1}
        return Mesh(**batch, **others, tensor=self.tensor)


@dataclass(frozen=True)
class JointPoint:
    """A way to train a step. A further dimension is a field here and its values in `space`.

    replica, data, tensor, context, expert, stages: degrees, of which the product is the number of
    devices; context cuts sequences, expert the weights of experts, and the batch for all else.
    zero: ZeRO stage, which divides over `data`, and over `expert` what is not of experts: further
    replicas hold the same shards (hybrid sharding).
    micro_batches: of a replica's share of the batch, one after another. sub_batches: of a
    micro-batch, interleaved. recompute, schedule: policies of `rematerialize` and
    `overlap-communication`. pipeline: the order of micro-batches, where there are stages or
    several micro-batches. buckets: MiB from which on a weight or a gradient travels alone. chunks:
    into how many stages `interleaved-1f1b` cuts what a device has; other orders have their own.
    recompute_layers: in how many blocks of each stage, its first, policy `layer` recomputes; 0: in
    all (Megatron-LM's `--recompute-num-layers`). loss_chunks: of the loss along tokens, where no
    schedule of micro-batches keeps the logits of one until its backward pass. offload: values that
    the host keeps for the backward pass.
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

    @property
    def pieces(self) -> int:
        """Into how many pieces the batch is cut, over devices and in time."""
        return self.replicas * self.micro_batches * self.sub_batches

    @property
    def replicas(self) -> int:
        """Over how many devices the batch is cut."""
        return self.replica * self.data * self.expert

    @property
    def within(self) -> int:
        """Number of devices over which the work on a sample is cut, stages not counted."""
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
        """Whether a step runs functions of micro-batches by a table."""
        return self.stages > 1 or self.micro_batches > 1

    @property
    def joins_messages(self) -> bool:
        """Whether messages of weights and gradients travel together, and none of a stage's share of
        them hides behind what other stages do."""
        summed = self.replicas * self.context
        return self.schedule in BUCKETED and summed > 1 and self.stages == 1

    def chooses(self, dimension: str) -> bool:
        """Whether a dimension's value makes a difference here, whatever it is."""
        if dimension == "pipeline":
            return self.stages > 1
        if dimension == "chunks":
            return self.stages > 1 and self.pipeline == INTERLEAVED
        if dimension == "recompute_layers":
            return self.recompute == "layer"
        if dimension == "loss_chunks":
            return not self.is_staged
        return dimension != "buckets" or self.joins_messages

    def value(self, dimension: str) -> str:
        """A dimension's value as a user writes it."""
        chosen = getattr(self, dimension)
        return str(chosen).lower() if isinstance(chosen, bool) else str(chosen)

    def with_value(self, **values: object) -> JointPoint:
        """The point with other values: thousands are made, so without `replace`'s checks."""
        return JointPoint(**{**vars(self), **values})  # pyright: ignore[reportArgumentType]

    def changed_from(self, other: JointPoint) -> set[str]:
        """The dimensions in which two points differ, except orders; degrees are `mesh`."""
        mine, theirs = vars(self), vars(other)
        changed = {n for n in DIMENSIONS if n not in ORDERS and mine[n] != theirs[n]}
        return {"mesh" if name in MESH else name for name in changed}

    def __str__(self) -> str:
        """Differences from the least choice, after the degrees: `data=8, recompute layer`."""
        words = [",".join(f"{axis}={getattr(self, axis)}" for axis in MESH if self._is_told(axis))]
        words += ["sequence parallel"] if self.sequence_parallel else []
        words += [f"zero {self.zero}"] if self.zero else []
        words += [f"recompute {self._recomputed}"] if self.recompute != "none" else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += [f"{self.sub_batches} sub-batches"] if self.sub_batches > 1 else []
        words += [f"loss in {self.loss_chunks} chunks"] if self.loss_chunks > 1 else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        words += [self.schedule]
        words += [self.pipeline] if self.stages > 1 else []
        words += [f"{self.chunks} chunks"] if self.chunks != JointPoint.chunks else []
        words += [f"buckets of {self.buckets} MiB"] if self.buckets != BUCKETS[0] else []
        return ", ".join(words)

    @property
    def _recomputed(self) -> str:
        """Policy, or how many layers it is: `3 layers`, `3 layers of each stage`."""
        if not self.recompute_layers:
            return self.recompute
        count = f"{self.recompute_layers} layer{'s' if self.recompute_layers > 1 else ''}"
        return f"{count} of each stage" if self.stages > 1 else count

    def _is_told(self, axis: str) -> bool:
        return axis in ("data", "tensor") or getattr(self, axis) > 1


DIMENSIONS = tuple(f.name for f in fields(JointPoint))
"""The dimensions' names, in order."""
