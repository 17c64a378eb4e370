"""How a layer's time grows with the micro-batch: t(m) = t(1) (phi + (1 - phi) m).

The profile has one sample at a time, and a small batch does not fill a fast device. phi is the
share of t(1) that is there whatever the size: kernel launches, and the host that issues them. What
grows with the samples is the layer's work: its roofline time on the device, split over the tensor
axis, over the share of a roofline that such kernels reach; and its all-reduces over that axis. All
else is fixed. The share comes from the profile itself: no layer can do its work faster than it
ran, so the largest share that any profiled layer shows bounds it from below, and is taken for
all. Nothing is fitted to steps that were measured.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardweave.planners.amp.model import LayeredModel, LayerWork
from shardweave.planners.amp.partition import Floats
from shardweave.planners.cost.cluster import Cluster, DeviceType
from shardweave.planners.cost.curves import interpolate


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
    """Bytes of one element."""
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
