"""AxoNN's communication model: Equations 1 to 10, for all grids of devices at once.

A grid is (Gx, Gy, Gz, Gdata), x innermost in the order of ranks. A layer O = I W has an input I of
m x k and a weight W of k x n. z shards the m rows that I has in a data group, y shards k, and x
shards n; each device's shard of W is stored in further shards over z. Every other layer is
transposed: in it x and y swap roles. Source: Singh et al., arXiv 2305.13525, section 5. All
functions take grids as an array of shape (grids, 4) and return one number per grid; they take time
linear in layers x grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.planners.cost.degrees import divisors

AXES = ("x", "y", "z", "data")
"""The axes of a grid, innermost first."""

Grids = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LinearLayer:
    """A linear map, or a convolution, where k and n are channels.

    rows_in, rows_out: rows of the input I and output O in the whole batch; in a convolution,
    samples times positions. kernel: positions of a convolution's kernel. is_transposed: whether x
    and y change roles. block: the repeated part of the model to which it belongs. repeats: number
    of equal layers.
    """

    rows_in: int
    rows_out: int
    k: int
    n: int
    is_transposed: bool = False
    kernel: int = 1
    block: str = ""
    repeats: int = 1

    @property
    def weights(self) -> int:
        return self.k * self.n * self.kernel


def grids_of(devices: int) -> Grids:
    """List all AxoNN grids (tensor degrees Gx, Gy, Gz, and data degree Gdata) of `devices` devices:
    C(p + 3, 3) for 2^p devices."""
    grids = [
        (x, y, z, devices // (x * y * z))
        for x in divisors(devices)
        for y in divisors(devices // x)
        for z in divisors(devices // (x * y))
    ]
    return np.array(grids, dtype=np.int64)


def _axes_of(layer: LinearLayer, grids: Grids) -> Numbers:
    """Sizes of the axes that act as x, y, z and data for a layer, each of shape (grids)."""
    sizes = grids.astype(np.float64).T
    return sizes[[1, 0, 2, 3]] if layer.is_transposed else sizes


@dataclass(frozen=True)
class AxisLinks:
    """Inverse speeds of each axis' collectives, by grid: seconds per element and per ring step.

    Both have the shape (4, grids), in the order of `AXES`.
    """

    element_s: Numbers
    step_s: Numbers


def agnostic_links(grids: Grids, bandwidth: float) -> AxisLinks:
    """Give all axes one bandwidth, in elements per second: volume alone then ranks grids."""
    return AxisLinks(np.full((4, len(grids)), 1 / bandwidth), np.zeros((4, len(grids))))


def communication_s(
    layers: Sequence[LinearLayer],
    grids: Grids,
    links: AxisLinks,
    *,
    reductions: float = 1.0,
    gathers: float | Numbers = 1.0,
) -> Numbers:
    """Seconds of communication by axis, shape (4, grids): Equations 1 to 6 with ring algorithms,
    with latencies and repetitions. In a transposed layer O is reduced over x, and the gradient of I
    over y.

    reductions: number of all-reduces of O in a step; 2 with recomputation. gathers: number of
    all-gathers of W, for all grids or by grid; 2 if the backward pass or recomputation gathers it
    again. The paper: 1, 1.
    """
    total = np.zeros((4, len(grids)))
    for layer in layers:
        gx, gy, gz, gdata = sizes = _axes_of(layer, grids)
        steps = sizes - 1
        row_x, row_y = (1, 0) if layer.is_transposed else (0, 1)
        weights = layer.weights / (gx * gy)
        rows_in, rows_out = layer.rows_in / gdata, layer.rows_out / gdata
        # Elements that a device sends of O, of the gradient of I, of W (or its gradient) over z,
        # and of the gradient of W among data groups.
        reduce_y = 2 * (gy - 1) / gy * rows_out * layer.n / (gz * gx)
        reduce_x = 2 * (gx - 1) / gx * rows_in * layer.k / (gz * gy)
        gather_z, scatter_z = (gz - 1) * weights / gz, (gz - 1) / gz * weights
        reduce_data = 2 * (gdata - 1) / gdata * weights / gz

        def spent(row: int, elements: Numbers, hops: Numbers) -> Numbers:
            return elements * links.element_s[row] + hops * links.step_s[row]

        total[row_x] += layer.repeats * spent(row_x, reduce_x, 2 * steps[0])
        total[row_y] += layer.repeats * reductions * spent(row_y, reduce_y, 2 * steps[1])
        gathered = gathers * spent(2, gather_z, steps[2])
        total[2] += layer.repeats * (gathered + spent(2, scatter_z, steps[2]))
        total[3] += layer.repeats * spent(3, reduce_data, 2 * steps[3])
    return total
