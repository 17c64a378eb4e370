"""Ranking all grids of a cluster's devices by AxoNN's model, with what it leaves out.

The corrected model counts bytes, latency, the bandwidth that a ring of each size and place has
on the cluster, collectives that recomputation repeats, gathers that are kept, and memory, which
must fit. Literal mode is the paper's equations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardweave.ir.mesh import Mesh
from shardweave.planners.axonn.model import (
    AXES,
    AxisLinks,
    Grids,
    LinearLayer,
    Numbers,
    Passes,
    agnostic_links,
    aware_links,
    communication_s,
    grids_of,
)
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.links import ring_of
from shardweave.planners.cost.quantity import gib


class AxonnError(ValueError):
    """No grid fits; the message says what is missing."""


@dataclass(frozen=True)
class Model:
    """What a grid is chosen for.

    itemsize: bytes of an element that is sent. state_bytes: of memory per element of a weight, in
    all that is stored in shards: weight, gradient and optimizer state. other_bytes: of the same for
    parameters outside the layers. kept_bytes: of what a step without recomputation keeps for
    its backward pass, whole batch, all devices.
    """

    layers: tuple[LinearLayer, ...]
    itemsize: int
    state_bytes: float
    other_bytes: float = 0.0
    kept_bytes: float = 0.0

    def merged(self) -> Model:
        """The same with equal layers counted instead of listed."""
        counts: dict[LinearLayer, int] = {}
        for layer in self.layers:
            key = replace(layer, block="", repeats=1)
            counts[key] = counts.get(key, 0) + layer.repeats
        layers = tuple(replace(one, repeats=n) for one, n in counts.items())
        return replace(self, layers=layers)


@dataclass(frozen=True)
class Options:
    """literal: the paper's equations as printed, without memory. aware: bandwidths by place
    (Equation 10, or measured rings), else one for all. checkpointing: the forward pass runs again.
    keep_gathered: gathered weights are kept for the backward pass. memory_bytes: of a device;
    None: the cluster's."""

    literal: bool = False
    aware: bool = True
    checkpointing: bool = False
    keep_gathered: bool = False
    memory_bytes: float | None = None

    @property
    def passes(self) -> Passes:
        if self.literal:
            return Passes()
        return Passes(
            outputs=2.0 if self.checkpointing else 1.0, gathers=1.0 if self.keep_gathered else 2.0
        )


@dataclass(frozen=True)
class Ranked:
    """One grid. communication_s: seconds by axis. memory_bytes: of a device by part."""

    grid: tuple[int, int, int, int]
    communication_s: Mapping[str, float]
    memory_bytes: Mapping[str, float]

    @property
    def time_s(self) -> float:
        """Seconds of all communication, one collective after another."""
        return sum(self.communication_s.values())

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes of the grid's mesh, x innermost; axes of size 1 too."""
        return {axis: self.grid[AXES.index(axis)] for axis in reversed(AXES)}


def rank_grids(
    model: Model,
    cluster: Cluster,
    devices: int,
    options: Options | None = None,
    *,
    accept: Callable[[tuple[int, int, int, int]], bool] | None = None,
) -> list[Ranked]:
    """All grids of `devices` devices that fit, the fastest first; exact for the model.

    accept: which grids the program can have. Time: O(distinct layers x grids), and one ring per
    pair of (inner size, size). Raises AxonnError if memory or the program admits none.
    """
    options = options or Options()
    grids = grids_of(devices)
    if accept is not None:
        keep = [accept((int(x), int(y), int(z), int(d))) for x, y, z, d in grids]
        grids = grids[np.array(keep, dtype=bool)]
        if not len(grids):
            raise AxonnError(
                f"no grid of {devices} devices divides the batch and the features of the layers; "
                "use another number of devices, or another batch."
            )
    memory = memory_of(model, grids, options)
    fits = np.ones(len(grids), dtype=bool)
    if not options.literal:
        fits = _fitting(memory, grids, cluster, devices, options)
        grids, memory = grids[fits], {part: size[fits] for part, size in memory.items()}
    merged = model.merged()
    links = links_of(cluster, devices, grids, model.itemsize, options)
    seconds = communication_s(merged.layers, grids, links, options.passes)
    order = np.argsort(seconds.sum(axis=0), kind="stable")
    return [
        Ranked(
            (int(grids[i, 0]), int(grids[i, 1]), int(grids[i, 2]), int(grids[i, 3])),
            {axis: float(seconds[row, i]) for row, axis in enumerate(AXES)},
            {part: float(size[i]) for part, size in memory.items()},
        )
        for i in order
    ]


def memory_of(model: Model, grids: Grids, options: Options) -> dict[str, Numbers]:
    """Bytes of one device by part, per grid.

    What is kept for the backward pass is dealt to layers in proportion to their inputs, and cut
    as those are: by data, by z, and by y, or x in a transposed layer. With recomputation, of each
    block the input of its first layer is kept, and the rest of one block.
    """
    gx, gy, gz, gdata = grids.astype(np.float64).T
    shards = [layer.repeats * layer.weights / (gx * gy) for layer in model.layers]
    weights = np.sum(shards, axis=0)
    kept = weights if options.keep_gathered else 2 * np.max(shards, axis=0)
    inputs = np.array([layer.repeats * layer.rows_in * layer.k for layer in model.layers])
    cut = [gdata * gz * (gx if layer.is_transposed else gy) for layer in model.layers]
    per_input = max(model.kept_bytes, model.itemsize * inputs.sum()) / inputs.sum()
    held = [per_input * size / parts for size, parts in zip(inputs, cut, strict=True)]
    activations = np.sum(held, axis=0)
    if options.checkpointing:
        blocks: dict[str, list[int]] = {}
        for index, layer in enumerate(model.layers):
            blocks.setdefault(layer.block, []).append(index)
        first = [ids[0] for ids in blocks.values()]
        entering = np.sum([model.itemsize * inputs[i] / cut[i] for i in first], axis=0)
        largest = np.max(
            [np.sum([held[i] for i in ids], axis=0) for ids in blocks.values()], axis=0
        )
        activations = entering + largest
    return {
        "parameters": model.state_bytes * weights / gz + model.other_bytes / gy,
        "gathered": model.itemsize * kept * (gz > 1),
        "activations": activations,
    }


def _fitting(
    memory: Mapping[str, Numbers],
    grids: Grids,
    cluster: Cluster,
    devices: int,
    options: Options,
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which grids fit into a device's memory. Raises AxonnError if none does."""
    capacity = options.memory_bytes
    if capacity is None:
        capacity = min(device.memory_bytes for device in cluster.device_types(devices))
    total = np.sum(list(memory.values()), axis=0)
    fits = total <= capacity
    if not fits.any():
        least = int(np.argmin(total))
        parts = ", ".join(f"{part} {gib(size[least])}" for part, size in memory.items())
        x, y, z, data = grids[least]
        raise AxonnError(
            f"no grid of {devices} devices fits: the smallest shortfall is "
            f"{gib(total[least] - capacity)} GiB, of x={x},y={y},z={z},data={data}, whose "
            f"GiB on a device of {gib(capacity)} are {parts}; use more devices, "
            "checkpointing, or a smaller batch."
        )
    return fits


def links_of(
    cluster: Cluster, devices: int, grids: Grids, itemsize: int, options: Options
) -> AxisLinks:
    """What collectives over each axis of each grid run at."""
    node = cluster.node_type(0)
    inter = node.network_bandwidth_bytes_s / itemsize
    if not options.aware:
        return agnostic_links(grids, inter)
    if options.literal:
        return aware_links(grids, node.devices, node.bandwidth_bytes_s / itemsize, inter)
    inner = np.cumprod(grids, axis=1) // grids
    known: dict[tuple[int, int], tuple[float, float]] = {}
    element_s, step_s = np.zeros((4, len(grids))), np.zeros((4, len(grids)))
    for row in range(4):
        for index in range(len(grids)):
            size, inside = int(grids[index, row]), int(inner[index, row])
            if (inside, size) not in known:
                known[inside, size] = _ring(cluster, devices, inside, size)
            bandwidth, latency = known[inside, size]
            element_s[row, index] = itemsize / bandwidth
            step_s[row, index] = latency
    return AxisLinks(element_s, step_s)


def _ring(cluster: Cluster, devices: int, inside: int, size: int) -> tuple[float, float]:
    """Bandwidth and latency of rings of `size` devices, each `inside` ranks after the other."""
    if size == 1:
        return float("inf"), 0.0
    mesh = Mesh(outer=devices // (inside * size), ring=size, inner=inside)
    ring = ring_of(cluster, mesh, ["ring"])
    return ring.bandwidth_bytes_s, ring.latency_s


def best(ranked: Sequence[Ranked], count: int) -> list[Ranked]:
    """The first few."""
    return list(ranked[: max(1, count)])
