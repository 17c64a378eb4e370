"""AMP's objective on a cluster as it is.

Against the published planner (`literal`): each stage takes the times of the devices that it runs
on, of mixed ones layer by layer the slowest; sizes are in bytes of the dtype, and a boundary
carries activations forward and gradients back, each tensor rank its share; flows that run at once
share the NICs, and the slowest hop counts, of a boundary and of a ring; a layer's time is affine in
the micro-batch (below); stages that do not fit into memory are left out; the synchronisation
is part of what the partition minimises (`search`).

A layer's time grows with the micro-batch as t(m) = t(1) (phi + (1 - phi) m). The profile has one
sample at a time, and a small batch does not fill a fast device. phi is the share of t(1) that is
there whatever the size: kernel launches, and the host that issues them. What grows with the samples
is the layer's work: its roofline time on the device, split over the tensor axis, over the share of
a roofline that such kernels reach; and its all-reduces over that axis. All else is fixed. The share
comes from the profile itself: no layer can do its work faster than it ran, so the largest share
that any profiled layer shows bounds it from below, and is taken for all. Nothing is fitted to steps
that were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardweave.planners.amp.estimate import BACKWARD, StageCosts, boundaries, micro_batches
from shardweave.planners.amp.memory import first_layers
from shardweave.planners.amp.model import LayeredModel, LayerWork, Strategy
from shardweave.planners.amp.network import (
    ClusterArrays,
    Grid,
    boundary_bandwidths,
    ring_bandwidths,
)
from shardweave.planners.amp.partition import Floats, Problem
from shardweave.planners.cost.cluster import Cluster, DeviceType, interpolate
from shardweave.planners.cost.zero import passes


@dataclass(frozen=True)
class CorrectedCosts:
    """Costs on the cluster as it is.

    dtype: of weights, gradients and activations. reached: the share of a roofline that layers
    reach; None takes the model's own profile (`reached_share`). limit_memory: False
    lets stages be larger than their devices.
    """

    model: LayeredModel
    links: ClusterArrays
    dtype: str = "float16"
    reached: float | None = None
    limit_memory: bool = True
    _layers: dict[tuple[str, int], tuple[Floats, Floats]] = field(
        default_factory=dict[tuple[str, int], tuple[Floats, Floats]], compare=False, repr=False
    )

    def stage_costs(self, strategy: Strategy, grid: Grid) -> StageCosts:
        tensor, data = strategy.tensor, strategy.data
        size = element_bytes(self.dtype)
        mixes = [tuple(np.unique(self.links.kind[stage]).tolist()) for stage in grid]
        kinds = list(dict.fromkeys(mixes))
        times = np.stack([self._times(mix, strategy) for mix in kinds])
        # Tensor ranks hold the same output: each sends its share, and gathers at the other end.
        sent = np.array(self.model.outputs[1]) / tensor * size * strategy.micro_batch
        both_ways = 2 / boundary_bandwidths(self.links, grid)
        repeats = float(micro_batches(self.model, strategy) - 1)
        first = first_layers(self.model, self.links, strategy, grid) if self.limit_memory else None
        problem = Problem(
            times=times,
            kinds=tuple(kinds.index(mix) for mix in mixes),
            boundary=boundaries(sent, both_ways),
            repeats=repeats,
            first=first,
        )
        rounds = passes(self.model.zero, micro_batches(self.model, strategy))
        ring_s = rounds * (data - 1) / data * size / ring_bandwidths(self.links, grid)
        return StageCosts(problem, ring_s)

    def _times(self, mix: Sequence[int], strategy: Strategy) -> Floats:
        """Seconds of a micro-batch, forward and backward, by layer, on devices of some kinds."""
        found: list[Floats] = []
        for kind in mix:
            once, shares = self._profile(self.links.names[kind], strategy.tensor)
            found.append(once * (shares + (1 - shares) * strategy.micro_batch))
        return BACKWARD * np.max(found, axis=0)

    def _profile(self, device: str, tensor: int) -> tuple[Floats, Floats]:
        """t(1) and phi by layer."""
        key = (device, tensor)
        if key not in self._layers:
            self._layers[key] = (self.model.times(device, tensor), self._shares(device, tensor))
        return self._layers[key]

    def _shares(self, device: str, tensor: int) -> Floats:
        if self.model.fixed is not None:
            return np.array(self.model.fixed[device][tensor])
        reached = self.reached
        if reached is None:
            devices = [self.links.cluster.devices[name] for name in self.links.names]
            reached = reached_share(self.model, devices, self.dtype)
        return fixed_shares(
            self.model, self.links.cluster, device, tensor, reached=reached, dtype=self.dtype
        )


def roofline_s(work: LayerWork, device: DeviceType, dtype: str) -> float:
    """Seconds of one sample's arithmetic and memory traffic, unsplit, one after the other."""
    peak = device.flops[dtype] * interpolate(device.efficiency, work.flops)
    return work.flops / peak + 2 * work.kept_bytes / device.memory_bandwidth_bytes_s


def reached_share(model: LayeredModel, devices: Iterable[DeviceType], dtype: str) -> float:
    """The largest share of its roofline that a profiled layer reaches, on one device.

    1 for a model whose layers have no stated work.
    """
    shares = (
        roofline_s(work, device, dtype) / seconds
        for device in devices
        for work, seconds in zip(model.work, model.times(device.name, 1).tolist(), strict=True)
        if work is not None
    )
    return max(shares, default=1.0)


def fixed_shares(
    model: LayeredModel, cluster: Cluster, device: str, tensor: int, *, reached: float, dtype: str
) -> Floats:
    """phi of each layer on a device type; 0 for those without stated work.

    reached: the share of a roofline that work runs at.
    """
    kind = cluster.devices[device]
    times = model.times(device, tensor)
    nodes = [node for node in cluster.nodes if node.device == device]
    bandwidth = min(node.bandwidth_bytes_s for node in nodes)
    size = element_bytes(dtype)
    found = np.zeros(model.num_layers)
    for layer, work in enumerate(model.work):
        if work is None:
            continue
        sent = 2 * (tensor - 1) / tensor * model.outputs[tensor][layer] * size
        grows = roofline_s(work, kind, dtype) / reached / tensor
        grows += work.all_reduces * sent / bandwidth if tensor > 1 else 0.0
        found[layer] = max(0.0, 1 - grows / times[layer])
    return found


def element_bytes(dtype: str) -> int:
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
