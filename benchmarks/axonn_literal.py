"""AxoNN's model as its paper prints it: Equations 1 to 10 alone, without memory."""

from __future__ import annotations

import numpy as np

from shardweave.planners.axonn.model import AXES, AxisLinks, Grids, communication_s, grids_of
from shardweave.planners.axonn.search import Model, Ranked, distinct
from shardweave.planners.cost.cluster import Cluster


def aware_links(grids: Grids, node: int, intra: float, inter: float) -> AxisLinks:
    """Equation 10, for `node` devices a node: bandwidths, in elements per second, within a node
    and of a whole node, which the groups that leave it share."""
    reach = np.cumprod(grids, axis=1).T
    inner = reach // grids.T
    bandwidth = np.where(reach <= node, intra, inter / np.minimum(node, inner))
    return AxisLinks(1 / bandwidth, np.zeros_like(bandwidth))


def rank_literally(model: Model, cluster: Cluster, devices: int) -> list[Ranked]:
    """All grids of devices, whether they fit into memory or not, the fastest first."""
    grids, node = grids_of(devices), cluster.node_type(0)
    intra, inter = node.bandwidth_bytes_s, node.network_bandwidth_bytes_s
    links = aware_links(grids, node.devices, intra / model.itemsize, inter / model.itemsize)
    seconds = communication_s(distinct(model.layers), grids, links)
    order = np.argsort(seconds.sum(axis=0), kind="stable")
    return [
        Ranked(
            (int(grids[i, 0]), int(grids[i, 1]), int(grids[i, 2]), int(grids[i, 3])),
            {axis: float(seconds[row, i]) for row, axis in enumerate(AXES)},
            {},
        )
        for i in order
    ]
