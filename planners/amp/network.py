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
    """A cluster as arrays, computed once. Bandwidths are in bytes per second, one direction.

    The arrays price many placements by the rule of `cost.links`: a search tries thousands. node:
    the node of each device. inside: bandwidth between two devices of one node, devices x devices;
    infinite for other pairs. nic: bandwidth of each node's NICs. names: the device types; kind: the
    type of each device, as an index of `names`.
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
        """Bandwidths of messages from devices `left` to devices `right`, all sent at once. Messages
        that leave one node share its NICs' bandwidth; so do those that enter it."""
        source, goal = self.node[left], self.node[right]
        crosses = source != goal
        count = len(self.nic)
        leaving = np.bincount(source[crosses], minlength=count)
        entering = np.bincount(goal[crosses], minlength=count)
        out = self.nic[source] / np.maximum(1, leaving[source])
        into = self.nic[goal] / np.maximum(1, entering[goal])
        return np.where(crosses, np.minimum(out, into), self.inside[left, right])


Grid = NDArray[np.intp]
"""The device of each rank; shape stages x replicas x tensor degree."""


def megatron_grid(strategy: Strategy) -> Grid:
    """Megatron's placement (AMP, Sec. 4.1): devices in the order tensor, then data, then stages."""
    shape = (strategy.pipeline, strategy.data, strategy.tensor)
    return np.arange(prod(shape), dtype=np.intp).reshape(shape)


def boundary_bandwidths(links: ClusterArrays, grid: Grid) -> Floats:
    """Bandwidth of the slowest message at each boundary between stages: shape (stages - 1). All
    replicas send at once, each tensor rank to the same rank of the next stage."""
    return np.array([float(links.shared(grid[s], grid[s + 1]).min()) for s in range(len(grid) - 1)])


def ring_bandwidths(links: ClusterArrays, grid: Grid) -> Floats:
    """Bandwidth of the slowest hop of each stage's data-parallel rings, with all rings in use."""
    following = np.roll(grid, -1, axis=1)
    return links.shared(grid, following).min(axis=(1, 2))
