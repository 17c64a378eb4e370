"""Devices of a 3D strategy's ranks, and bandwidths of their pipelines and rings."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardweave.planners.amp.model import Strategy
from shardweave.planners.amp.partition import Floats, Ints
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.plan.plan_parts import PlanError

MOST_DEVICES = 2**14
"""Most devices: a matrix of devices x devices then takes 2 GiB."""


@dataclass(frozen=True)
class ClusterArrays:
    """A cluster as arrays, made once: bytes per second, one direction.

    The rule of `cost.links` for many placements at once: a search looks at thousands of them.
    node: of each device. inside: between two devices of one node, devices x devices, infinite
    elsewhere. nic: of each node. names: the device types, and `kind`, that of each device.
    """

    cluster: Cluster
    node: Ints
    inside: Floats
    nic: Floats
    names: tuple[str, ...]
    kind: Ints

    @staticmethod
    def of(cluster: Cluster) -> ClusterArrays:
        if cluster.num_devices > MOST_DEVICES:
            raise PlanError(
                f"cluster '{cluster.name}' has {cluster.num_devices} devices, but planner 'amp' "
                f"can plan for at most {MOST_DEVICES}, as it stores the bandwidth between every "
                "two; use fewer nodes, or another planner."
            )
        places = [cluster.place(rank) for rank in range(cluster.num_devices)]
        node = np.array([index for index, _ in places], dtype=np.intp)
        inside = np.full((len(places), len(places)), np.inf)
        for left, (number, place) in enumerate(places):
            for right, (other, other_place) in enumerate(places):
                if number == other and left != right:
                    inside[left, right] = cluster.node_type(number).link(place, other_place)[0]
        nodes = [cluster.node_type(index) for index in range(cluster.num_nodes)]
        nic = np.array([n.network_bandwidth_bytes_s for n in nodes])
        names = tuple(dict.fromkeys(n.device for n in nodes))
        kind = np.array([names.index(nodes[n].device) for n, _ in places], dtype=np.intp)
        return ClusterArrays(cluster, node, inside, nic, names, kind)

    def shared(self, left: Ints, right: Ints) -> Floats:
        """Bandwidths of concurrent flows from devices `left` to `right`.

        A NIC's flows out share what it carries one way, and so do its flows in.
        """
        source, goal = self.node[left], self.node[right]
        crosses = source != goal
        count = len(self.nic)
        leaving = np.bincount(source[crosses], minlength=count)
        entering = np.bincount(goal[crosses], minlength=count)
        out = self.nic[source] / np.maximum(1, leaving[source])
        into = self.nic[goal] / np.maximum(1, entering[goal])
        return np.where(crosses, np.minimum(out, into), self.inside[left, right])


Grid = NDArray[np.intp]
"""The device of each rank, stages x replicas x tensor."""


def megatron_grid(strategy: Strategy) -> Grid:
    """Megatron's placement (AMP, Sec. 4.1): tensor ranks are neighbours, then data, then stages."""
    shape = (strategy.pipeline, strategy.data, strategy.tensor)
    return np.arange(prod(shape), dtype=np.intp).reshape(shape)


def boundary_bandwidths(links: ClusterArrays, grid: Grid) -> Floats:
    """Bandwidth of the slowest flow at each boundary between stages, of shape (stages - 1).

    All replicas send at once, each tensor rank to its like.
    """
    return np.array([float(links.shared(grid[s], grid[s + 1]).min()) for s in range(len(grid) - 1)])


def ring_bandwidths(links: ClusterArrays, grid: Grid) -> Floats:
    """Bandwidth of the slowest hop of each stage's data-parallel rings, all running at once."""
    following = np.roll(grid, -1, axis=1)
    return links.shared(grid, following).min(axis=(1, 2))
