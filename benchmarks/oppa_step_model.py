"""A step of a transformer under any configuration, as a closed form: it times simulated trials.

It knows more than OPPA's formulas (`prior`): matrix products reach a share of the peak that
depends on their size, ops cost a launch and memory traffic, rings have the latency and the
slowest link of their placement with the NICs shared, gradients go in buckets that overlap with
the backward pass and slow it down, chunks cost messages and unequal stages, ZeRO trades messages
for memory. What both have is common knowledge: a ring's (p - 1) / p, the pipeline's bubble over
its chunks, and (the extended form) what ZeRO divides and how often it reduces. It runs no
program: it is a closed form, so that whole spaces can be evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster, DeviceType, interpolate
from shardweave.planners.cost.links import Ring, ring_of
from shardweave.planners.trials.space import Configuration

MIB = 2**20
ELEMENT = 2
"""Bytes of weights, gradients and activations: 16 bits."""

OPTIMIZER = 12
"""Bytes of a parameter's state: 32-bit weight and two moments."""

KERNELS = 12
"""Launches in a layer's forward pass beside its matrix products."""

FRAGMENTED = 1.06
"""Memory taken for memory used."""


@dataclass(frozen=True)
class Transformer:
    """A decoder, by its sizes. mlp_matrices: 3 of a gated MLP, else 2. batch: samples of a step."""

    name: str
    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocab: int
    seq: int
    batch: int
    mlp_matrices: int = 2

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""
        return 4 * self.hidden**2 + self.mlp_matrices * self.hidden * self.feed_forward

    @property
    def table_parameters(self) -> int:
        """Of the embedding, and as many of the output projection."""
        return self.vocab * self.hidden


@dataclass(frozen=True)
class StepCost:
    """Seconds by part, and bytes of the fullest device."""

    pipeline_s: float
    messages_s: float
    reduction_s: float
    update_s: float
    peak_bytes: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.messages_s + self.reduction_s + self.update_s


@dataclass(frozen=True)
class StepModel:
    """Costs of a transformer on the devices of a cluster, all of one type."""

    model: Transformer
    cluster: Cluster
    _rings: dict[tuple[Mesh, str], Ring] = field(
        default_factory=dict[tuple[Mesh, str], Ring], compare=False, repr=False
    )

    def cost(self, one: Configuration) -> StepCost:
        """What a step takes. Raises ClusterError if the cluster is smaller."""
        return _Step(self, one).cost()

    def ring(self, mesh: Mesh, axis: str) -> Ring:
        """The rings over an axis; looked up after the first time."""
        key = (mesh, axis)
        if key not in self._rings:
            self.cluster.check_fits(mesh.num_devices, f"the mesh {mesh}")
            self._rings[key] = ring_of(self.cluster, mesh, [axis])
        return self._rings[key]


@dataclass(frozen=True)
class _Step:
    machine: StepModel
    one: Configuration

    @property
    def model(self) -> Transformer:
        return self.machine.model

    @property
    def cluster(self) -> Cluster:
        return self.machine.cluster

    def cost(self) -> StepCost:
        """All parts."""
        stages = self.stage_s
        count, chunks = self.one.micro_batches, self.one.chunks
        slowest = max(stages)
        pipeline_s = count * slowest + (sum(stages) - slowest) / chunks
        return StepCost(
            pipeline_s=pipeline_s,
            messages_s=self._messages_s(),
            reduction_s=self._reduction_s(),
            update_s=self._update_s(),
            peak_bytes=max(self._stage_bytes(0), self._stage_bytes(self.one.pipeline - 1)),
        )

    # Compute

    @cached_property
    def device(self) -> DeviceType:
        return self.cluster.device_types(self.one.devices)[0]

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on a replica."""
        return self.model.batch / (self.one.data * self.one.micro_batches) * self.model.seq

    def product_s(self, flops: float, operands: float) -> float:
        """A matrix product that reads and writes some elements."""
        device = self.device
        rate = device.flops["bfloat16"] * interpolate(device.efficiency, flops)
        traffic = ELEMENT * operands / device.memory_bandwidth_bytes_s
        return max(flops / rate, traffic) + device.overhead_s

    @cached_property
    def layer_s(self) -> float:
        """The ops of a layer's forward pass for a micro-batch."""
        model, tokens, tensor = self.model, self.tokens, self.one.tensor
        h, f = model.hidden, model.feed_forward
        widths = [(h, 3 * h / tensor), (h / tensor, h)]
        widths += [(h, f / tensor)] * (model.mlp_matrices - 1) + [(f / tensor, h)]
        found = sum(self.product_s(2 * tokens * k * n, tokens * (k + n) + k * n) for k, n in widths)
        found += 2 * self.product_s(2 * tokens * model.seq * h / tensor, 2 * tokens * h / tensor)
        elements = tokens * (10 * h + 4 * f / tensor)
        found += ELEMENT * elements / self.device.memory_bandwidth_bytes_s
        return found + KERNELS * self.device.overhead_s

    @cached_property
    def head_s(self) -> float:
        """The output projection and the loss, forward."""
        model, tokens, share = self.model, self.tokens, self.model.vocab / self.one.tensor
        product = self.product_s(
            2 * tokens * model.hidden * share,
            tokens * (model.hidden + share) + model.hidden * share,
        )
        return product + 4 * 2 * tokens * share / self.device.memory_bandwidth_bytes_s

    @property
    def forward_s(self) -> float:
        """A layer's forward pass, with its two all-reduces."""
        return self.layer_s + 2 * self.all_reduce_s(
            "tensor", self.tokens * self.model.hidden * ELEMENT
        )

    @property
    def backward_s(self) -> float:
        """A layer's backward pass, with what is recomputed."""
        again = self.forward_s if self.one.recompute != "none" else 0.0
        return self.forward_s + self.layer_s + again

    @cached_property
    def stage_layers(self) -> list[int]:
        """Layers of each stage: chunks are dealt to the stages in turn, the first ones larger."""
        stages, chunks = self.one.pipeline, self.one.chunks
        quotient, rest = divmod(self.model.layers, stages * chunks)
        return [
            sum(quotient + (chunk * stages + stage < rest) for chunk in range(chunks))
            for stage in range(stages)
        ]

    @cached_property
    def stage_s(self) -> list[float]:
        """Forward and backward of a micro-batch by stage; the last one has the head."""
        both = self.forward_s + self.backward_s
        found = [layers * both for layers in self.stage_layers]
        found[-1] += 3 * self.head_s
        return found

    # Communication

    @cached_property
    def mesh(self) -> Mesh:
        """Tensor ranks stand next to each other, then the replicas, then the stages."""
        return Mesh(pipeline=self.one.pipeline, data=self.one.data, tensor=self.one.tensor)

    def ring(self, axis: str) -> Ring:
        return self.machine.ring(self.mesh, axis)

    def _pass_s(self, axis: str, size: float) -> float:
        """Once round a ring: a reduce-scatter, or an all-gather, of `size` bytes."""
        ranks = self.mesh.size(axis)
        if ranks == 1:
            return 0.0
        ring = self.ring(axis)
        return (ranks - 1) * (ring.latency_s + size / ranks / ring.bandwidth_bytes_s)

    def all_reduce_s(self, axis: str, size: float) -> float:
        """Of `size` bytes."""
        return 2 * self._pass_s(axis, size)

    def _messages_s(self) -> float:
        """Between stages: each micro-batch enters and leaves each chunk, and nothing hides it."""
        if self.one.pipeline == 1:
            return 0.0
        ring = self.ring("pipeline")
        size = self.tokens * self.model.hidden * ELEMENT
        once = ring.latency_s + size / ring.bandwidth_bytes_s + 4 * self.device.overhead_s
        return 2 * self.one.chunks * self.one.micro_batches * once

    def _reduction_s(self) -> float:
        """What of the gradients' reduction, and of ZeRO's gathers, is not hidden."""
        one, size = self.one, self._weight_bytes(0)
        if one.data == 1:
            return 0.0
        behind = self.stage_layers[0] * self.backward_s
        if one.zero == 0:
            return self._exposed_s(size, one.data_bucket_mib, behind, 2)
        bucket = one.zero_bucket_mib
        scatter = self._exposed_s(size, bucket, behind, 1)
        if one.zero == 1:
            return scatter + self._bucketed_s(size, bucket, 1)
        if one.zero == 2:
            return one.micro_batches * scatter + self._bucketed_s(size, bucket, 1)
        # Forward gathers weights; backward gathers them again and scatters gradients.
        ahead = self.stage_layers[0] * self.forward_s
        forward = self._exposed_s(size, bucket, ahead, 1)
        return one.micro_batches * (forward + self._exposed_s(size, bucket, behind, 2))

    def _messages(self, size: float, bucket_mib: int) -> int:
        """At most one for each weight: buckets hold whole ones (DistributedDataParallel, ZeRO)."""
        weights = 1 + self.stage_layers[0] * (4 + self.model.mlp_matrices)
        return min(weights, math.ceil(size / (bucket_mib * MIB)))

    def _bucketed_s(self, size: float, bucket_mib: int, passes: int) -> float:
        count = self._messages(size, bucket_mib)
        return count * passes * self._pass_s("data", size / count)

    def _exposed_s(self, size: float, bucket_mib: int, behind_s: float, passes: int) -> float:
        """Buckets behind compute: one can go when its part of the compute is done.

        The first has to wait for its part, the last for all of it; and what runs beside messages
        is slower.
        """
        count = self._messages(size, bucket_mib)
        total = self._bucketed_s(size, bucket_mib, passes)
        end = max(behind_s / count + total, behind_s + total / count)
        slowed = (self.cluster.overlap_slowdown - 1) * min(total, behind_s)
        return end - behind_s + slowed

    def _update_s(self) -> float:
        """The optimizer reads and writes all states that a device has."""
        share = 1 / self.one.data if self.one.zero else 1.0
        states = self._weight_bytes(0) / ELEMENT * (OPTIMIZER + 2 * ELEMENT) * share
        return 2 * states / self.device.memory_bandwidth_bytes_s

    # Memory

    def _weight_bytes(self, stage: int) -> float:
        """Of a stage's parameters on a device, in 16 bits."""
        model, last = self.model, self.one.pipeline - 1
        count = self.stage_layers[stage] * model.layer_parameters
        count += model.table_parameters * ((stage == 0) + (stage == last))
        return ELEMENT * count / self.one.tensor

    def _stage_bytes(self, stage: int) -> float:
        one = self.one
        weights = self._weight_bytes(stage)
        share = [1 / one.data if one.zero >= stage_of else 1.0 for stage_of in (1, 2, 3)]
        states = weights * (OPTIMIZER / ELEMENT * share[0] + share[1] + share[2])
        bucket = one.data_bucket_mib if one.zero == 0 else one.zero_bucket_mib
        buffers = 2 * min(bucket * MIB, weights) if one.data > 1 else 0.0
        return FRAGMENTED * (states + buffers + self._activation_bytes(stage))

    def _activation_bytes(self, stage: int) -> float:
        """Kept for the backward pass, per layer 10 + 24 / tensor bytes of each hidden element.

        (Korthikanti et al. 2022, without attention's matrices.) A recomputed layer keeps its input.
        """
        one, model = self.one, self.model
        element = self.tokens * model.hidden
        whole = element * (10 + 24 / one.tensor)
        kept = whole if one.recompute == "none" else ELEMENT * element
        layers = kept * self.stage_layers[stage] * self._in_flight(stage)
        logits = 0.0
        if stage == one.pipeline - 1:
            logits = 2 * 4 * self.tokens * model.vocab / one.tensor
        return layers + whole + logits

    def _in_flight(self, stage: int) -> float:
        """Micro-batches that a stage keeps at once: of 1F1B, or of its interleaved form."""
        one = self.one
        if one.chunks == 1:
            return min(one.micro_batches, one.pipeline - stage)
        pieces = 2 * (one.pipeline - stage - 1) + (one.chunks - 1) * one.pipeline + 1
        return min(one.micro_batches, pieces / one.chunks)
