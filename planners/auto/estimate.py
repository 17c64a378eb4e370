"""Closed-form estimates of points of the search space, from costs of their blocks.

The estimate ranks points. The lower bound never exceeds the simulated time, provided that a block
costs the same alone as within the step; a point whose bound is above the best step so far needs no
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardweave.passes.memory.chunk_loss import logits_bytes
from shardweave.passes.messages.merge_collectives import BUCKET_BYTES
from shardweave.planners.auto.reader import REPEATING, CostReader, PieceCost
from shardweave.planners.auto.space.point import BUCKETED, JointPoint, ReplicaCut
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.model import CostModel
from shardweave.planners.megatron.planner import CONTEXT, EXPERT
from shardweave.planners.plan.plan_parts import OFFLOAD, offloaded
from shardweave.planners.plan.zero import (
    DATA_AXIS,
    REPLICA_AXIS,
    divided,
    ring_passes,
    whole_for_a_while,
)
from shardweave.planners.simulate.update_cost import UpdateCost

WEIGHTS_SHARE = 0.5
"""Share of a backward pass that computes weight gradients, which can hide other messages."""

LOGITS = 2
"""Number of values of the logits' size that are live at once while the loss is computed."""

MAY_FIT = 2.0
"""Largest estimated memory of a point to simulate, as a multiple of the capacity: estimates of
small models are up to 1.4 times the simulated memory."""

FITS_SURELY = 0.8
"""Share of the memory below which a point is expected to fit, since estimates may be too low."""


@dataclass(frozen=True)
class PointEstimate:
    """Estimated time and memory of a point. time_s: ranks points. bound_s: lower bound for any
    schedule. filling_s: lower bound for schedules whose pipeline fills and drains with whole passes
    (1f1b). memory_bytes: peak of the fullest stage. state_bytes: that stage's parameters and
    training state."""

    time_s: float
    bound_s: float
    filling_s: float
    memory_bytes: float
    state_bytes: float


@dataclass(eq=False)
class Estimator:
    """Estimates points; each takes microseconds once its `PieceCost` is known."""

    reader: CostReader
    precision: str = ""
    update: str = ""
    _rings: dict[tuple[int, int, ReplicaCut, tuple[str, ...]], tuple[float, float]] = field(
        default_factory=dict[tuple[int, int, ReplicaCut, tuple[str, ...]], tuple[float, float]]
    )
    _joined: dict[tuple[int, int, int], tuple[int, float]] = field(
        default_factory=dict[tuple[int, int, int], tuple[int, float]]
    )
    _stages: dict[tuple[ReplicaCut, int, str, float, int], float] = field(
        default_factory=dict[tuple[ReplicaCut, int, str, float, int], float]
    )
    _estimates: dict[JointPoint, PointEstimate] = field(
        default_factory=dict[JointPoint, PointEstimate]
    )

    @property
    def cluster(self) -> Cluster:
        return self.reader.cluster

    @cached_property
    def _update(self) -> UpdateCost | None:
        """The cost of the optimizer's update on one device; None if no update is named."""
        if not self.update:
            return None
        from shardweave.planners.simulate.update import simulate_update  # traces, loads slowly

        model = CostModel(self.cluster)
        return simulate_update([self.reader.depths.program], self.update, model, self.precision)

    def _update_s(self, point: JointPoint) -> float:
        """Seconds of the update: one device's work, divided by the devices that shard it."""
        whole_s = 0.0 if self._update is None else self._update.seconds
        copies = point.replica if point.zero else point.replicas
        return whole_s * copies / (point.tensor * point.stages * point.replicas)

    @cached_property
    def _logits_bytes(self) -> int:
        return LOGITS * logits_bytes(self.reader.depths.read)

    def chunked_bytes(self, point: JointPoint) -> float:
        """Bytes of a device's logits and their gradients, which chunking the loss may save."""
        return 0.0 if point.is_staged else self._logits_bytes / point.pieces / point.within

    def spared_bytes(self, point: JointPoint, dimension: str) -> float:
        """Bytes per device that `dimension`, `loss_chunks` or `offload`, may save; 0 if in use."""
        if point.value(dimension) != JointPoint().value(dimension):
            return 0.0
        if dimension == "offload":
            point = point.with_value(offload=OFFLOAD[-1])
            return self.offloaded_bytes(point) + self.host_bytes(point)
        return self.chunked_bytes(point)

    def offloaded_bytes(self, point: JointPoint) -> float:
        """Bytes that a point's `offload` saves on the fullest stage: values of all blocks but two,
        one being read, one in flight. 0 if a device type has no bandwidth to its host."""
        return self._away_bytes(point) * self._pieces_kept(point)

    def _away_bytes(self, point: JointPoint) -> float:
        """Bytes of a piece's values that a point's `offload` copies to the hosts of all stages."""
        values, _ = offloaded(point.offload)
        if values == "none" or not self._host_bytes_s:
            return 0.0
        cost = self.cost_of(point)
        sums, blocks = cost.sums, sum(cost.repeated) / point.stages
        share = recomputed_share(point, cost) if point.recompute in REPEATING else 0.0
        crossing, kept = sums["repeated crossing"], sums["repeated kept"]
        away = crossing if values == "inputs" else share * crossing + (1 - share) * kept
        return max(0.0, 1 - 2 / max(1.0, blocks)) * away

    def host_bytes(self, point: JointPoint) -> float:
        """Bytes of the fullest stage's optimizer states, which can be kept on the host. 0 if a
        device type has no bandwidth to its host."""
        return self._states(point, self.cost_of(point))["optimizer"] if self._host_bytes_s else 0.0

    @cached_property
    def _host_bytes_s(self) -> float:
        """Bandwidth of the slowest device type to its host; 0 if one has none."""
        devices = self.cluster.device_types(self.cluster.num_devices)
        return min(device.host_bandwidth_bytes_s for device in devices)

    def _copies_s(self, point: JointPoint) -> tuple[float, float]:
        """Seconds in which a device copies a step's values to its host, and in which it copies the
        optimizer states from its host and back."""
        values, states = offloaded(point.offload)
        if not self._host_bytes_s or (values == "none" and not states):
            return 0.0, 0.0
        pieces = point.sub_batches * point.micro_batches / point.stages
        kept = 2 * self.host_bytes(point) if states else 0.0
        return self._away_bytes(point) * pieces / self._host_bytes_s, kept / self._host_bytes_s

    def _pieces_kept(self, point: JointPoint) -> float:
        """A stage's kept bytes for its pieces, divided by all blocks' kept bytes for one piece."""
        in_flight = float(min(point.stages, point.micro_batches))
        if point.pipeline == "gpipe":
            in_flight = point.micro_batches
        chunks = self._chunks(point)
        if chunks > 1:
            # Passes of chunks ahead on the first device (interleaved 1F1B).
            ahead = (chunks - 1) * point.stages + 2 * (point.stages - 1) + 1
            in_flight = min(point.micro_batches, ahead / chunks)
        return point.sub_batches * in_flight / point.stages

    def cost_of(self, point: JointPoint) -> PieceCost:
        return self.reader.cost(point.cut, self.reader.batch // point.pieces, point.recompute)

    def estimate(self, point: JointPoint) -> PointEstimate:
        """Estimate a point, once. Raises ValueError if the program cannot be sharded for it."""
        if point not in self._estimates:
            self._estimates[point] = self._estimated(point)
        return self._estimates[point]

    def _estimated(self, point: JointPoint) -> PointEstimate:
        cost = self.cost_of(point)
        sums = cost.sums
        subs, micro = point.sub_batches, point.micro_batches
        share = recomputed_share(point, cost)
        again = share * sums["repeated forward"] if point.recompute in REPEATING else 0.0
        # The work that a schedule cannot avoid: after-communication repeats some of it, and where
        # stages are uneven some have fewer layers than are to be recomputed in each.
        least = compute = subs * (sums["forward"] + sums["backward"])
        inside = least_inside = subs * (sums["inside_forward"] + sums["inside_backward"])
        if point.recompute == "layer":
            compute += subs * again
            inside += subs * share * sums["repeated inside_forward"]
            if not point.recompute_layers:
                least, least_inside = compute, inside
        elif point.recompute == "after-communication":
            compute += 0.75 * subs * again
        exposed = self._exposed(point, compute, inside)
        sync, sync_bound = self._sync(point, sums["parameters"] / point.stages, compute)
        time_s = micro * (compute + exposed)
        if point.stages > 1:
            slot = self._slowest_share(point, cost) * (compute + exposed)
            time_s = micro * slot + (compute + exposed - slot) / self._chunks(point)
            time_s += self._between(point, cost)
        values_s, states_s = self._copies_s(point)
        bound_s = max(micro * max(least, least_inside) / point.stages, sync_bound, values_s)
        filling_s = max(bound_s, filled(least, point.stages, micro)) + states_s
        memory, state = self._memory(point, cost)
        # Values travel beside compute, once each way, and states beside the update.
        time_s = max(time_s + sync, 2 * values_s) + max(self._update_s(point), states_s)
        return PointEstimate(time_s, bound_s + states_s, filling_s, memory, state)

    def _chunks(self, point: JointPoint) -> int:
        return point.chunks if point.chooses("chunks") else 1

    def _exposed(self, point: JointPoint, compute: float, inside: float) -> float:
        """Seconds of messages within a replica that compute does not hide."""
        if not inside or point.schedule == "blocking":
            return inside
        if point.sub_batches > 1:
            later = 1 - 1 / point.sub_batches
            return max(inside * (1 - later), inside - later * compute)
        hidden = 0.0 if point.is_staged else min(inside / 2, WEIGHTS_SHARE * compute / 2)
        return inside - hidden

    def _slowest_share(self, point: JointPoint, cost: PieceCost) -> float:
        """The slowest stage's share of both passes' seconds, for stages as even as possible."""
        rows = self.reader.batch // point.pieces
        share = recomputed_share(point, cost)
        key = point.cut, rows, point.recompute, share, point.stages
        if key not in self._stages:
            times = cost.passes_s(point.recompute, share)
            self._stages[key] = bottleneck(times, point.stages) / max(sum(times), 1e-30)
        return self._stages[key]

    def _sync(self, point: JointPoint, size: float, compute: float) -> tuple[float, float]:
        """Exposed seconds of the messages between replicas, and a lower bound of their seconds."""
        if point.replicas * point.context == 1:
            return 0.0, 0.0
        by_bytes, begin_s = self._once(point, size)
        count, copied = self._messages(point)
        once = by_bytes + count * begin_s
        times = ring_passes(point.zero, point.micro_batches)
        sent = times * once
        # Gathers may be spared; what an all-reduce sends may not.
        least = min(times, 2) * by_bytes
        if point.is_staged and (point.zero < 2 or point.schedule not in BUCKETED):
            # Sums travel behind the last pass, and the papers' schedules start nothing ahead.
            return sent + times * self._copy_s(copied), least
        if point.schedule == "blocking":
            return sent, least
        waited = 0.0
        if point.schedule not in BUCKETED:
            # The papers' schedules start messages where they stand: weights are waited for.
            waited = (0, 1, 1, 2)[point.zero] * once
        elif point.is_staged and point.zero == 2:
            waited = once  # weights are gathered before the first micro-batch
        # What replicas of shards add up travels behind the last pass, where there are several.
        behind = times * self._again(point, size) if point.is_staged else 0.0
        waited, beside = waited + behind, sent - waited - behind
        # The backward pass of the last micro-batch hides it, or for stages 2 and 3 all do.
        count = point.micro_batches if point.zero > 1 else 1
        hides = compute * count * (2 / 3 if point.zero < 3 else 1.0) / point.stages
        tail = beside / max(1, len(self.reader.depths.names) // point.stages)
        # Each pass of a micro-batch is a function of its own, which has an end.
        exposed = max(beside - hides, min(beside, tail if point.is_staged else tail / count))
        slower = (self.cluster.overlap_slowdown - 1) * (beside - exposed)
        return waited + exposed + slower + times * self._copy_s(copied), least

    def _copy_s(self, size: float) -> float:
        """Seconds to copy `size` bytes into a message or out of it."""
        devices = self.cluster.device_types(self.cluster.num_devices)
        return 2 * size / min(device.memory_bandwidth_bytes_s for device in devices)

    def _parts(self, point: JointPoint, size: float) -> list[tuple[float, tuple[str, ...], int]]:
        """Return (bytes, axes over which ZeRO may shard, number of devices on them) for the
        parameters outside experts, and for those of experts."""
        share = self.reader.expert_share(point.cut)
        parts = [((1 - share) * size, (DATA_AXIS, EXPERT), point.data * point.expert)]
        return [*parts, (share * size, (DATA_AXIS,), point.data)] if share else parts

    def _once(self, point: JointPoint, size: float) -> tuple[float, float]:
        """Seconds to reduce-scatter or all-gather a stage's parameters over its replicas once, and
        seconds of a message without bytes."""
        again = () if self._is_divided(point) else (REPLICA_AXIS, CONTEXT)
        rings = [
            (part, self._ring(point, (*axes, *again))) for part, axes, _ in self._parts(point, size)
        ]
        by_bytes = sum(rate * part for part, (rate, _) in rings)
        return by_bytes + self._again(point, size), max(begin_s for _, (_, begin_s) in rings)

    def _again(self, point: JointPoint, size: float) -> float:
        """Seconds of `_once` to all-reduce shards over further replicas, divided by the number of
        ring passes: this is sent once, whatever the ZeRO stage and the number of micro-batches."""
        if not self._is_divided(point):
            return 0.0
        rate, _ = self._ring(point, (REPLICA_AXIS, CONTEXT))
        shards = sum(part / devices for part, _, devices in self._parts(point, size))
        return 2 / ring_passes(point.zero, point.micro_batches) * rate * shards

    def _is_divided(self, point: JointPoint) -> bool:
        """True if ZeRO shards over only some replicas, so that others hold equal shards."""
        return point.zero > 0 and point.replica * point.context > 1

    def _ring(self, point: JointPoint, over: tuple[str, ...]) -> tuple[float, float]:
        """Seconds per byte, and seconds of an empty message, of a ring over the axes `over`."""
        key = point.replica, point.data, point.cut, over
        if key not in self._rings:
            mesh = point.cut.mesh(point.data, point.replica)
            axes = tuple(name for name in mesh.names if name in over)
            model = CostModel(self.cluster, mesh)
            begin_s = model.sync_time_s("reduce_scatter", axes, 0.0)
            large_s = model.sync_time_s("reduce_scatter", axes, 1e9)
            self._rings[key] = (large_s - begin_s) / 1e9, begin_s
        return self._rings[key]

    def _messages(self, point: JointPoint) -> tuple[int, float]:
        """Number of messages of a stage's gradients, and bytes copied to join gradients."""
        limit = point.buckets * 2**20 if point.schedule in BUCKETED else 0
        if point.is_staged and point.zero == 0 and not limit:
            limit = sum(self.reader.parameter_bytes)  # `merge-collectives` joins them
        key = point.tensor, limit, point.stages
        if key not in self._joined:
            sizes = [size / point.tensor for size in self.reader.parameter_bytes]
            small = [size for size in sizes if size < limit]
            joined = math.ceil(sum(small) / max(BUCKET_BYTES, limit))
            count = math.ceil((len(sizes) - len(small) + joined) / point.stages)
            self._joined[key] = count, sum(small) / point.stages
        return self._joined[key]

    def _between(self, point: JointPoint, cost: PieceCost) -> float:
        """Seconds of messages between stages for the first and the last micro-batch, both ways."""
        middle = cost.blocks[len(cost.blocks) // 2].crossing_bytes * point.sub_batches
        node = self.cluster.nodes[0]
        is_inside = point.replicas * point.tensor * point.context * 2 <= node.devices
        bandwidth = node.bandwidth_bytes_s if is_inside else node.network_bandwidth_bytes_s
        flows = 1 if is_inside else min(node.devices, point.replicas * point.context * point.tensor)
        each = middle * flows / bandwidth if bandwidth else 0.0
        count = point.stages * self._chunks(point) - 1
        return 2 * count * (each + self.cluster.network_latency_s)

    def _memory(self, point: JointPoint, cost: PieceCost) -> tuple[float, float]:
        """Peak bytes of the fullest stage, and its bytes of parameters, gradients and optimizer."""
        sums, states = cost.sums, self._states(point, cost)
        state = sum(states.values())
        if offloaded(point.offload)[1]:
            state -= states["optimizer"]
        kept = sums["kept"]
        if point.recompute in REPEATING:
            share = recomputed_share(point, cost)
            kept -= share * sums["repeated kept"]
            kept += share * sums["repeated crossing"] * _crossings_kept(point)
        kept *= self._pieces_kept(point)
        kept -= self.offloaded_bytes(point)
        kept += sums["largest kept"] if point.recompute in REPEATING else 0.0
        whole = whole_for_a_while(point.zero) * sums["largest parameters"]
        whole -= (1 - 1 / point.loss_chunks) * self.chunked_bytes(point)
        return state + kept + sums["workspace"] + whole, state

    def _states(self, point: JointPoint, cost: PieceCost) -> dict[str, float]:
        """Bytes of the fullest stage's parameters, gradients and optimizer states, by part."""
        size = max(cost.sums["parameters"] / point.stages, cost.sums["largest parameters"])
        kept = None
        if self._update is not None:
            kept = self._update.state_bytes / max(1, sum(self.reader.parameter_bytes))
        states = [
            divided(state_bytes(part, cost.itemsize, self.precision, kept), point.zero, devices)
            for part, _, devices in self._parts(point, size)
        ]
        return {part: sum(state[part] for state in states) for part in states[0]}


def _crossings_kept(point: JointPoint) -> int:
    """Values of a block that a policy of `REPEATING` keeps, in shards of the block's input:
    `after-communication` keeps what two sums return or, if sequences are sharded, shards of them
    and what two gathers return."""
    if point.recompute == "layer":
        return 1
    return 2 + 2 * point.tensor if point.sequence_parallel else 2


def recomputed_share(point: JointPoint, cost: PieceCost) -> float:
    """Share of the repeated blocks that the point recomputes: 1 without `recompute_layers`."""
    if not point.recompute_layers:
        return 1.0
    stages = point.stages * point.stages_each if point.stages > 1 else 1
    return min(1.0, point.recompute_layers * stages / max(1, sum(cost.repeated)))


def filled(each_s: float, stages: int, micro_batches: int) -> float:
    """Lower bound of the seconds of a 1f1b or gpipe pipeline, for any cuts into stages, if a
    micro-batch takes `each_s` through all stages.

    A stage runs all m micro-batches after the first one has passed the stages before it. With cuts
    that make these times equal to T on all S stages, T (1 - (1 - 1/m)^S) = each_s.
    """
    return each_s / (1 - (1 - 1 / micro_batches) ** stages)


def bottleneck(times: Sequence[float], stages: int) -> float:
    """The slowest group's time if `times` are cut into at most `stages` contiguous groups as evenly
    as possible, to a thousandth; by bisection over greedy cuts."""
    low, high = max(max(times, default=0.0), sum(times) / stages), sum(times)
    if stages == 1:
        return high
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _parts_below(times, middle) <= stages else (middle, high)
    return high


def _parts_below(times: Sequence[float], most: float) -> int:
    parts, total = 1, 0.0
    for seconds in times:
        if total + seconds > most:
            parts, total = parts + 1, 0.0
        total += seconds
    return parts
