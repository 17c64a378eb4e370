"""What of a profiled layer's time does not grow with the micro-batch: phi, by a roofline.

The published profile has one sample at a time, and a small batch does not fill a fast device. What
grows with the samples is the layer's work: its roofline time on the device, split over the tensor
axis, over the share of a roofline that such kernels reach; and its all-reduces over that axis. All
else is fixed. The share comes from the profile itself: no layer can do its work faster than it ran,
so the largest share that any profiled layer shows bounds it from below, and is taken for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.model import LayeredModel
from shardweave.planners.amp.partition import Floats
from shardweave.planners.cost.cluster import Cluster, DeviceType, interpolate

DTYPE = "float16"


@dataclass(frozen=True)
class LayerWork:
    """What one sample costs in a layer's forward pass, unsplit.

    flops: arithmetic. kept_bytes: activations written for the backward pass, all of them read
    once on the way. all_reduces: over the tensor axis, of the layer's output, when it is split.
    """

    flops: float
    kept_bytes: float
    all_reduces: int


Work = Sequence[LayerWork | None]
"""By layer; None for layers whose time is all theirs (small ones, and plain products)."""


def roofline_s(work: LayerWork, device: DeviceType) -> float:
    """Seconds of one sample's arithmetic and memory traffic, unsplit, one after the other."""
    peak = device.flops[DTYPE] * interpolate(device.efficiency, work.flops)
    return work.flops / peak + 2 * work.kept_bytes / device.memory_bandwidth_bytes_s


def reached_share(model: LayeredModel, work: Work, devices: Iterable[DeviceType]) -> float:
    """The largest share of its roofline that a profiled layer reaches, on one device."""
    return max(
        roofline_s(one, device) / seconds
        for device in devices
        for one, seconds in zip(work, model.times(device.name, 1).tolist(), strict=True)
        if one is not None
    )


def fixed_shares(
    model: LayeredModel, work: Work, cluster: Cluster, device: str, tensor: int, *, reached: float
) -> Floats:
    """phi of each layer on a device type; 0 for those without stated work.

    reached: the share of a roofline that work runs at.
    """
    times = model.times(device, tensor)
    bandwidth = min(node.bandwidth_bytes_s for node in cluster.nodes if node.device == device)
    found = np.zeros(model.num_layers)
    for layer, one in enumerate(work):
        if one is None:
            continue
        sent = 2 * (tensor - 1) / tensor * model.outputs[tensor][layer] * model.itemsize
        grows = roofline_s(one, cluster.devices[device]) / reached / tensor
        grows += one.all_reduces * sent / bandwidth if tensor > 1 else 0.0
        found[layer] = max(0.0, 1 - grows / times[layer])
    return found
