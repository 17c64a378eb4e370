"""Bandwidth of communication on a cluster: of rings, and of messages between pairs of ranks.

Only this module models how messages share NICs; `model.CostModel` computes seconds from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster

NODE_LINK = "node"
"""The links between the devices of one node."""

NETWORK_LINK = "network"
"""The network adapters (NICs)."""

HOST_LINK = "host"
"""The link between a device and its host's memory."""


@dataclass(frozen=True)
class Ring:
    """The ring of a collective over mesh axes; the slowest of its groups counts for all.

    ranks: number of ranks in a group. nodes: the most nodes that a group spans. bandwidth_bytes_s,
    latency_s: of the slowest hop, where the flows of all groups that cross a NIC share its
    bandwidth. flows: number of flows that share the busiest NIC. links: kinds of links used, such
    as NODE_LINK.
    """

    ranks: int
    nodes: int
    bandwidth_bytes_s: float
    latency_s: float
    flows: int
    links: tuple[str, ...]


def ring_of(cluster: Cluster, mesh: Mesh, axes: Sequence[str], *, all_pairs: bool = False) -> Ring:
    """Build the ring over `axes`. all_pairs: each rank sends to all others, as in all-to-all. A
    ring visits its ranks in ascending order, so that it enters and leaves each node once."""
    wide = [axis for axis in axes if mesh.size(axis) > 1]
    groups = [sorted(group) for group in mesh.groups(wide)]
    hops = [hop for group in groups for hop in _hops(group, all_pairs)]
    crossing = _flows(cluster, groups, all_pairs)
    bandwidths, latencies, links = [float("inf")], [0.0], dict[str, None]()
    measured = {} if all_pairs else _measured(cluster, groups)
    for left, right in hops:
        bandwidth, latency, link = _hop(cluster, left, right, crossing, crossing)
        bandwidths.append(measured.get(left, bandwidth))
        latencies.append(latency)
        links[link] = None
    nodes = max(len({cluster.place(rank)[0] for rank in group}) for group in groups)
    return Ring(
        len(groups[0]),
        nodes,
        min(bandwidths),
        max(latencies),
        max(crossing.values(), default=1),
        tuple(sorted(links)),
    )


def transfer_s(
    cluster: Cluster, senders: Sequence[int], receivers: Sequence[int], size_bytes: float
) -> float:
    """Seconds until messages of one size, all sent at the same time, have arrived. senders,
    receivers: the ranks of each message."""
    hops = hops_at_once(cluster, list(zip(senders, receivers, strict=True)))
    bandwidth = min(bandwidth for bandwidth, _ in hops)
    latency_s = max(latency_s for _, latency_s in hops)
    return latency_s + (size_bytes / bandwidth if size_bytes else 0.0)


def hops_at_once(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Bandwidth (bytes/s) and latency (s) of each message while all are sent at the same time.

    pairs: (sender, receiver). Messages that leave or enter one node share its NICs; a message from
    a rank to itself is free.
    """
    nodes = [(cluster.place(left)[0], cluster.place(right)[0]) for left, right in pairs]
    leaving = Counter(left for left, right in nodes if left != right)
    entering = Counter(right for left, right in nodes if left != right)
    return [
        (math.inf, 0.0) if left == right else _hop(cluster, left, right, leaving, entering)[:2]
        for left, right in pairs
    ]


def _hops(group: Sequence[int], all_pairs: bool) -> Iterable[tuple[int, int]]:
    if len(group) == 1:
        return []
    if all_pairs:
        return ((left, right) for left in group for right in group if left != right)
    return zip(group, [*group[1:], group[0]], strict=True)


def _flows(cluster: Cluster, groups: Iterable[Sequence[int]], all_pairs: bool) -> Counter[int]:
    flows: Counter[int] = Counter()
    for group in groups:
        senders: set[tuple[int, int]] = set()
        for left, right in _hops(group, all_pairs):
            if cluster.place(left)[0] != cluster.place(right)[0]:
                senders.add((cluster.place(left)[0], left))
        flows.update(node for node, _ in senders)
    return flows


def _hop(
    cluster: Cluster, left: int, right: int, leaving: Counter[int], entering: Counter[int]
) -> tuple[float, float, str]:
    (node, place), (other, other_place) = cluster.place(left), cluster.place(right)
    if node == other:
        return (*cluster.node_type(node).link(place, other_place), NODE_LINK)
    shares = [
        cluster.node_type(n).network_bandwidth_bytes_s / max(1, flows[n])
        for n, flows in ((node, leaving), (other, entering))
    ]
    return min(shares), cluster.network_latency_s, NETWORK_LINK


def _measured(cluster: Cluster, groups: Iterable[Sequence[int]]) -> dict[int, float]:
    bandwidths: dict[int, float] = {}
    for group in groups:
        nodes = {cluster.place(rank)[0] for rank in group}
        strides = {right - left for left, right in pairwise(group)}
        if len(nodes) > 1 or len(strides) != 1:
            continue
        for ring in cluster.node_type(nodes.pop()).rings:
            if ring.ranks == len(group) and {ring.stride} == strides:
                bandwidths.update(dict.fromkeys(group, ring.bandwidth_bytes_s))
    return bandwidths
