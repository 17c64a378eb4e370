"""Ranking of all grids of a cluster's devices by AxoNN's model, extended and corrected.

The corrected model counts bytes, latency, the bandwidth of a ring by its size and place on the
cluster, collectives that recomputation repeats, gathered weights that are kept, and memory, which
must suffice. Literal mode is the paper's equations alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.axonn.model import (
    AXES,
    AxisLinks,
    Grids,
    LinearLayer,
    Numbers,
    agnostic_links,
    communication_s,
    grids_of,
)
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.links import ring_of
from shardweave.planners.cost.quantity import gib
from shardweave.planners.plan.plan_parts import PlanError


@dataclass(frozen=True)
class Model:
    """The model (neural network) for which a grid is chosen, in numbers.

    itemsize: bytes of a sent element. state_bytes: bytes per element of a weight that is stored in
    shards: weight, gradient and optimizer state. other_bytes: bytes of these, in all, for
    parameters outside the layers. kept_bytes: bytes that a step without recomputation keeps for its
    backward pass, for the whole batch, on all devices.
    """

    layers: tuple[LinearLayer, ...]
    itemsize: int
    state_bytes: float
    other_bytes: float = 0.0
    kept_bytes: float = 0.0

    @property
    def num_blocks(self) -> int:
        """Number of the model's blocks that have linear layers."""
        return len({layer.block for layer in self.layers})


@dataclass(frozen=True)
class Options:
    """Options of the search. aware: price collectives by placement (measured rings), else with one
    bandwidth. checkpointing: the forward pass is recomputed. keep_gathered: keep the gathered
    weights of as many blocks as fit for the backward pass."""

    aware: bool = True
    checkpointing: bool = False
    keep_gathered: bool = False


@dataclass(frozen=True)
class Ranked:
    """A ranked grid. communication_s: seconds by axis. memory_bytes: of a device, by part.
    kept_blocks: number of blocks whose gathered weights are kept; kept_bytes: their bytes."""

    grid: tuple[int, int, int, int]
    communication_s: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    kept_blocks: int = 0
    kept_bytes: int = 0

    @property
    def time_s(self) -> float:
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
    """Rank all grids of `devices` devices that fit, the fastest first; exact for the model.

    accept: whether the program can have a grid. Time: O(distinct layers x grids), and one ring per
    pair of (inner size, size). Raises PlanError if no grid fits into memory and the program.
    """
    options = options or Options()
    grids = grids_of(devices)
    if accept is not None:
        keep = [accept((int(x), int(y), int(z), int(d))) for x, y, z, d in grids]
        grids = grids[np.array(keep, dtype=bool)]
        if not len(grids):
            raise PlanError(
                f"no grid of {devices} devices divides the batch and the features of the layers; "
                "use another number of devices, or another batch."
            )
    memory = grid_memory_of(model, grids, options)
    fits = _fitting(memory, grids, cluster, devices)
    grids, memory = grids[fits], {part: size[fits] for part, size in memory.items()}
    blocks = model.num_blocks
    kept = np.zeros(len(grids))
    if options.keep_gathered:
        each = _gathered_bytes(model, grids) / blocks
        free = _capacity(cluster, devices) - np.sum(list(memory.values()), axis=0)
        kept = np.where(each > 0, np.clip(free // np.maximum(each, 1), 0, blocks), 0)
        memory["kept gathered"] = kept * each
    seconds = communication_s(
        distinct(model.layers),
        grids,
        links_of(cluster, devices, grids, model.itemsize, options),
        reductions=2.0 if options.checkpointing else 1.0,
        gathers=2.0 - kept / blocks,
    )
    order = np.argsort(seconds.sum(axis=0), kind="stable")
    return [
        Ranked(
            (int(grids[i, 0]), int(grids[i, 1]), int(grids[i, 2]), int(grids[i, 3])),
            {axis: float(seconds[row, i]) for row, axis in enumerate(AXES)},
            {part: float(size[i]) for part, size in memory.items()},
            int(kept[i]),
            int(memory["kept gathered"][i]) if options.keep_gathered else 0,
        )
        for i in order
    ]


def distinct(layers: Iterable[LinearLayer]) -> list[LinearLayer]:
    """Merge equal layers; `repeats` counts them."""
    counts: Counter[LinearLayer] = Counter()
    for layer in layers:
        counts[replace(layer, block="", repeats=1)] += layer.repeats
    return [replace(layer, repeats=count) for layer, count in counts.items()]


def grid_memory_of(model: Model, grids: Grids, options: Options) -> dict[str, Numbers]:
    """Bytes of one device by part, per grid.

    Bytes kept for the backward pass are divided among layers in proportion to their inputs, and
    sharded like these: over data, z, and y (x in a transposed layer). With recomputation, the input
    of each block's first layer is kept, and one block's other values.
    """
    gx, gy, gz, gdata = grids.astype(np.float64).T
    shards = [layer.repeats * layer.weights / (gx * gy) for layer in model.layers]
    weights = np.sum(shards, axis=0)
    passing = 2 * np.max(shards, axis=0)
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
        "gathered": model.itemsize * passing * (gz > 1),
        "activations": activations,
    }


def _gathered_bytes(model: Model, grids: Grids) -> Numbers:
    """Bytes on a device of all weights that are gathered over z, per grid."""
    gx, gy, gz, _ = grids.astype(np.float64).T
    weights = sum(layer.repeats * layer.weights for layer in model.layers)
    return model.itemsize * weights / (gx * gy) * (gz > 1)


def _capacity(cluster: Cluster, devices: int) -> float:
    return min(device.memory_bytes for device in cluster.device_types(devices))


def _fitting(
    memory: Mapping[str, Numbers], grids: Grids, cluster: Cluster, devices: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the grids that fit into a device's memory. Raises PlanError if none does."""
    capacity = _capacity(cluster, devices)
    total = np.sum(list(memory.values()), axis=0)
    fits = total <= capacity
    if not fits.any():
        least = int(np.argmin(total))
        parts = ", ".join(f"{part} {gib(size[least])}" for part, size in memory.items())
        x, y, z, data = grids[least]
        raise PlanError(
            f"no grid of {devices} devices fits into memory. Nearest is "
            f"x={x},y={y},z={z},data={data}, which needs {gib(total[least] - capacity)} GiB more "
            f"than the {gib(capacity)} GiB of a device ({parts}); use more devices, "
            "checkpointing, or a smaller batch."
        )
    return fits


def links_of(
    cluster: Cluster, devices: int, grids: Grids, itemsize: int, options: Options
) -> AxisLinks:
    """Speeds of collectives over each axis of each grid."""
    if not options.aware:
        return agnostic_links(grids, cluster.node_type(0).network_bandwidth_bytes_s / itemsize)

    @cache
    def ring(inside: int, size: int) -> tuple[float, float]:
        """Seconds per element and per step of a ring of `size` devices, `inside` ranks apart."""
        if size == 1:
            return 0.0, 0.0
        mesh = Mesh(outer=devices // (inside * size), ring=size, inner=inside)
        hops = ring_of(cluster, mesh, ["ring"])
        return itemsize / hops.bandwidth_bytes_s, hops.latency_s

    inner = np.cumprod(grids, axis=1) // grids
    rings = [
        [ring(inside, size) for inside, size in zip(*axis, strict=True)]
        for axis in zip(inner.T.tolist(), grids.T.tolist(), strict=True)
    ]
    speeds = np.array(rings)
    return AxisLinks(speeds[..., 0], speeds[..., 1])
