"""What a point of the joint space takes by its blocks, in closed form: to rank, and to prune.

The estimate ranks points; the bound never exceeds what the simulator finds, as far as blocks cost
alone what they cost in the step, so that a point whose bound is above the best step so far needs
no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardweave.ir.mesh import Mesh
from shardweave.planners.auto.point import JointPoint
from shardweave.planners.auto.reader import CostReader, PieceCost
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.zero import DATA_AXIS, divided, passes, whole_for_a_while

WEIGHTS_SHARE = 0.5
"""Of a backward pass, what computes gradients of weights, behind which other messages hide."""

FITS_SURELY = 0.8
"""Share of the memory up to which an estimate is trusted to fit."""


@dataclass(frozen=True)
class PointEstimate:
    """time_s: to rank by. bound_s: no schedule of the point is faster. memory_bytes: at the peak,
    of the fullest stage. state_bytes: of it what no schedule changes."""

    time_s: float
    bound_s: float
    memory_bytes: float
    state_bytes: float


@dataclass(eq=False)
class Estimator:
    """Estimates points; a few microseconds each, beside a partition for each `PieceCost`."""

    reader: CostReader
    precision: str = ""
    _syncs: dict[tuple[int, int, str], float] = field(
        default_factory=dict[tuple[int, int, str], float]
    )
    _stages: dict[tuple[int, bool, int, str, int], float] = field(
        default_factory=dict[tuple[int, bool, int, str, int], float]
    )

    @property
    def cluster(self) -> Cluster:
        return self.reader.cluster

    def cost_of(self, point: JointPoint) -> PieceCost:
        rows = self.reader.batch // point.pieces
        return self.reader.cost(point.tensor, point.sequence_parallel, rows)

    def estimate(self, point: JointPoint) -> PointEstimate:
        """Raises ValueError if the point's shardings cannot be."""
        cost = self.cost_of(point)
        sums = cost.sums
        subs, micro = point.sub_batches, point.micro_batches
        again = 0.0 if point.recompute == "none" else sums["repeated forward"]
        # The work that a schedule cannot avoid: after-communication repeats some of it.
        least = subs * (sums["forward"] + sums["backward"])
        least += subs * again if point.recompute == "layer" else 0.0
        compute = least + (0.75 * subs * again if point.recompute == "after-communication" else 0.0)
        inside = subs * (sums["inside_forward"] + sums["inside_backward"])
        if point.recompute == "layer":
            inside += subs * sums["repeated inside_forward"]
        exposed = self._exposed(point, compute, inside)
        slowest = (
            self._slowest(point, cost)
            * (compute + exposed)
            / max(subs * sum(cost.passes_s(point.recompute)), 1e-30)
        )
        sync, sync_bound = self._sync(point, sums["parameters"] / point.stages, compute)
        time_s = micro * (compute + exposed)
        if point.stages > 1:
            time_s = (micro - 1) * subs * slowest + (compute + exposed)
            time_s += self._between(point, cost)
        bound_s = max(micro * least / point.stages, micro * inside / point.stages, sync_bound)
        memory, state = self._memory(point, cost)
        return PointEstimate(time_s + sync, bound_s, memory, state)

    def _exposed(self, point: JointPoint, compute: float, inside: float) -> float:
        """Messages within a replica that compute does not hide."""
        if point.schedule == "blocking" or not inside:
            return inside
        if point.sub_batches > 1:
            later = 1 - 1 / point.sub_batches
            return max(inside * (1 - later), inside - later * compute)
        hidden = 0.0 if point.is_staged else min(inside / 2, WEIGHTS_SHARE * compute / 2)
        return inside - hidden

    def _slowest(self, point: JointPoint, cost: PieceCost) -> float:
        """Seconds of the slowest of stages that are cut as evenly as blocks allow."""
        rows = self.reader.batch // point.pieces
        key = point.tensor, point.sequence_parallel, rows, point.recompute, point.stages
        if key not in self._stages:
            self._stages[key] = bottleneck(cost.passes_s(point.recompute), point.stages)
        return self._stages[key]

    def _sync(self, point: JointPoint, size: float, compute: float) -> tuple[float, float]:
        """What replicas send that nothing hides, and what they send at least."""
        if point.data == 1:
            return 0.0, 0.0
        once = self.sync_s(point, "reduce_scatter", size)
        sent = passes(point.zero, point.micro_batches) * once
        if point.schedule == "blocking":
            return sent, min(sent, 2 * once)
        # The backward pass of the last micro-batch hides it, or for stages 2 and 3 all do.
        count = point.micro_batches if point.zero > 1 else 1
        hides = compute * count * (2 / 3 if point.zero < 3 else 1.0) / point.stages
        # Gathers may be spared; what an all-reduce sends may not.
        least = min(sent, 2 * once)
        tail = sent / count / max(1, len(self.reader.depths.names) // point.stages)
        return max(sent - hides, min(sent, tail)), least

    def sync_s(self, point: JointPoint, kind: str, size: float) -> float:
        """Seconds of a collective over the replicas of one stage, of whole parameters' bytes."""
        key = point.data, point.tensor, kind
        if key not in self._syncs:
            mesh = Mesh(data=point.data, tensor=point.tensor)
            model = CostModel(self.cluster, mesh)
            self._syncs[key] = model.sync_time_s(kind, (DATA_AXIS,), 1e9) / 1e9
        return self._syncs[key] * size

    def _between(self, point: JointPoint, cost: PieceCost) -> float:
        """Messages between stages of the first and the last micro-batch, both ways."""
        middle = cost.blocks[len(cost.blocks) // 2].crossing_bytes * point.sub_batches
        node = self.cluster.nodes[0]
        is_inside = point.data * point.tensor * 2 <= node.devices
        bandwidth = node.bandwidth_bytes_s if is_inside else node.network_bandwidth_bytes_s
        flows = 1 if is_inside else min(node.devices, point.data * point.tensor)
        each = middle / point.tensor * flows / bandwidth if bandwidth else 0.0
        return 2 * (point.stages - 1) * (each + self.cluster.network_latency_s)

    def _memory(self, point: JointPoint, cost: PieceCost) -> tuple[float, float]:
        """Bytes of the fullest stage, and of them parameters, gradients and optimizer."""
        sums = cost.sums
        size = max(sums["parameters"] / point.stages, sums["largest parameters"])
        state = sum(
            divided(
                state_bytes(size, cost.itemsize, self.precision), point.zero, point.data
            ).values()
        )
        kept = sums["kept"]
        if point.recompute != "none":
            kept -= sums["repeated kept"]
            kept += sums["repeated crossing"] * (1 if point.recompute == "layer" else 2)
        in_flight = min(point.stages, point.micro_batches)
        if point.pipeline == "gpipe":
            in_flight = point.micro_batches
        kept *= point.sub_batches * in_flight / point.stages
        kept += sums["largest kept"] if point.recompute != "none" else 0.0
        whole = whole_for_a_while(point.zero) * sums["largest parameters"]
        return state + kept + sums["workspace"] + whole, state


def bottleneck(times: Sequence[float], stages: int) -> float:
    """The least that the slowest of so many contiguous parts takes, to a thousandth, by bisection
    over greedy cuts."""
    low, high = max(max(times, default=0.0), sum(times) / stages), sum(times)
    if stages == 1:
        return high
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _parts_below(times, middle) <= stages else (middle, high)
    return high


def _parts_below(times: Sequence[float], most: float) -> int:
    parts, total = 1, 0.0
    for one in times:
        if total + one > most:
            parts, total = parts + 1, 0.0
        total += one
    return parts
