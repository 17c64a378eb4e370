"""Clusters that programs run on: device types, nodes of devices, and the links between them.

Rank r of a mesh is device r of the cluster, counted node by node, so that the mesh's last axis
stays within a node as long as it fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate

Points = tuple[tuple[float, float], ...]
"""A curve as (x, y) pairs with growing x > 0; values in between are interpolated on log axes."""


class ClusterError(ValueError):
    """Raised for a wrong cluster description; the message says where and what to write."""


@dataclass(frozen=True)
class DeviceType:
    """One kind of device, such as a model of GPU.

    flops: peak FLOP/s by dtype (`float32`, `bfloat16`, ..). overhead_s: fixed seconds of every op,
    such as a kernel launch. issue_s: seconds that the host takes to issue an op, ahead of the
    device: the device waits for it if its ops are shorter. efficiency: share of the peak that a
    matrix product reaches, by its FLOPs. unaligned_slowdown: factor on the time of a 16-bit matrix
    product if rows of an operand, or of the result, are no multiple of `aligned_bytes`.
    attention_efficiency: share of the peak that fused attention reaches, by the FLOPs that its
    kernel computes (half of them under a causal mask); empty: `efficiency`, by all FLOPs. op_times:
    seconds of ops by name, as curves: over FLOPs in float32 for matrix products, convolutions and
    attention, over bytes moved for all other ops; `default` is the curve of others without one.
    measured: seconds by signature (`cost.signature_text`); they take precedence over all else.
    host_bandwidth_bytes_s: bandwidth of the link to host memory, one direction, while all devices
    of the node use theirs; 0: unknown, and copies to the host cannot be priced.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth_bytes_s: float
    overhead_s: float = 0.0
    issue_s: float = 0.0
    efficiency: Points = ((1.0, 1.0),)
    unaligned_slowdown: float = 1.0
    aligned_bytes: int = 16
    attention_efficiency: Points = ()
    op_times: Mapping[str, Points] = field(default_factory=dict[str, Points])
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    host_bandwidth_bytes_s: float = 0.0


@dataclass(frozen=True)
class Island:
    """Neighbouring devices within a node that a faster link joins, such as pairs of GPUs on NVLink.

    Devices are assigned to islands in order. The bandwidth is one device's, one direction.
    """

    devices: int
    bandwidth_bytes_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class MeasuredRing:
    """Measured bytes per second that each rank sends in a ring within a node, one direction.

    Applies to rings of `ranks` devices whose indices on the node are `stride` apart. Several links
    may carry one ring, so this may differ from the bandwidth of every link.
    """

    stride: int
    ranks: int
    bandwidth_bytes_s: float


@dataclass(frozen=True)
class NodeType:
    """Group of `count` equal nodes.

    device: name of the nodes' device type. devices: number on each node. bandwidth_bytes_s,
    latency_s: of a device's link to the others of its node, one direction. islands: faster links
    between neighbours, smallest island first. rings: measured bandwidths of rings of devices, which
    take precedence over the links. nics: number of network adapters (NICs) of a node.
    nic_bandwidth_bytes_s: bandwidth of each NIC, one direction.
    """

    device: str
    devices: int
    count: int = 1
    bandwidth_bytes_s: float = 0.0
    latency_s: float = 0.0
    islands: tuple[Island, ...] = ()
    rings: tuple[MeasuredRing, ...] = ()
    nics: int = 1
    nic_bandwidth_bytes_s: float = 0.0

    @property
    def network_bandwidth_bytes_s(self) -> float:
        """Bandwidth of all NICs of one node together, one direction."""
        return self.nics * self.nic_bandwidth_bytes_s

    def link(self, left: int, right: int) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) between two devices of a node, by index on it."""
        for island in self.islands:
            if left // island.devices == right // island.devices:
                return island.bandwidth_bytes_s, island.latency_s
        return self.bandwidth_bytes_s, self.latency_s


@dataclass(frozen=True)
class CollectiveTimes:
    """Measured seconds of one kind of collective among `ranks` ranks on `nodes` nodes.

    kind: `all_reduce`, `all_gather`, .. . points: curve of seconds over the bytes of one rank's
    operands, measured while no other group uses the links.
    """

    kind: str
    ranks: int
    nodes: int
    points: Points


@dataclass(frozen=True)
class Cluster:
    """Devices, nodes and the network.

    network_latency_s: of a message between nodes. overlap_slowdown: factor on the time of compute
    while communication is in flight; node_overlap_slowdown: the same factor for communication
    within a node, which occupies more of the device (0: `overlap_slowdown`); link_slowdown: factor
    on the time of communication while the device computes. start_overhead_s,
    start_bandwidth_bytes_s: time of the device to start a collective: a constant, plus a copy of
    the operands at this bandwidth (0: no copy). message_overhead_s, message_bandwidth_bytes_s: the
    same for sending a message to another stage, and for receiving one (both 0: start_overhead_s).
    collectives: measured times, which take precedence over the model of rings.
    """

    name: str
    devices: Mapping[str, DeviceType]
    nodes: tuple[NodeType, ...]
    network_latency_s: float = 0.0
    overlap_slowdown: float = 1.0
    node_overlap_slowdown: float = 0.0
    link_slowdown: float = 1.0
    start_overhead_s: float = 0.0
    start_bandwidth_bytes_s: float = 0.0
    message_overhead_s: float = 0.0
    message_bandwidth_bytes_s: float = 0.0
    collectives: tuple[CollectiveTimes, ...] = ()

    def slowdown_beside(self, *, is_inside: bool) -> float:
        """Factor on compute time while a message is sent. is_inside: within a node."""
        return (is_inside and self.node_overlap_slowdown) or self.overlap_slowdown

    def message_work_s(self, size_bytes: float) -> float:
        """Seconds that a device spends on sending or receiving a message between stages."""
        if not self.message_overhead_s and not self.message_bandwidth_bytes_s:
            return self.start_overhead_s
        bandwidth = self.message_bandwidth_bytes_s
        return self.message_overhead_s + (size_bytes / bandwidth if bandwidth else 0.0)

    @cached_property
    def num_nodes(self) -> int:
        """Nodes of all types together."""
        return sum(node.count for node in self.nodes)

    @cached_property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return sum(node.count * node.devices for node in self.nodes)

    @cached_property
    def _node_list(self) -> tuple[NodeType, ...]:
        return tuple(node for node in self.nodes for _ in range(node.count))

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [0, *accumulate(node.devices for node in self._node_list)][:-1]

    def node_type(self, node: int) -> NodeType:
        """Type of the node of this index."""
        return self._node_list[node]

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's node, and the index of its device on the node. ClusterError if there is none."""
        if not 0 <= rank < self.num_devices:
            raise ClusterError(
                f"cluster '{self.name}' has {self.num_devices} devices and no rank {rank}; use a "
                "smaller mesh or add nodes."
            )
        return self._place_of_device(rank)

    def _place_of_device(self, device: int) -> tuple[int, int]:
        node = bisect_right(self._first_ranks, device) - 1
        return node, device - self._first_ranks[node]

    def device_types(self, num_ranks: int) -> list[DeviceType]:
        """The distinct device types of the first `num_ranks` ranks."""
        names: dict[str, None] = {}
        left = num_ranks
        for node in self.nodes:
            if left > 0:
                names[node.device] = None
            left -= node.count * node.devices
        return [self.devices[name] for name in names]

    def check_fits(self, num_ranks: int, what: str = "the mesh") -> None:
        """Raises ClusterError unless the cluster has a device for every rank."""
        if num_ranks > self.num_devices:
            raise ClusterError(
                f"{what} has {num_ranks} devices, but cluster '{self.name}' has only "
                f"{self.num_devices}; use a smaller mesh, or more nodes (a larger "
                "'count' in a cluster's file, or NAME:nodes=N of a preset)."
            )


def interpolate(points: Points, x: float) -> float:
    """The y of a curve at `x` > 0; beyond either end of the curve, the y of that end."""
    index = bisect_left(points, (x,))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    if y0 <= 0 or y1 <= 0:
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))


def time_at(points: Points, work: float) -> float:
    """Seconds for `work` on the curve `points`, extended beyond its end in proportion to work."""
    last, seconds = points[-1]
    if work > last:
        return seconds * work / last
    return interpolate(points, work)


@dataclass(frozen=True)
class PlacedCluster(Cluster):
    """A cluster whose rank r is device `order[r]`; nodes, links and NICs stay the same."""

    order: tuple[int, ...] = ()

    @cached_property
    def num_devices(self) -> int:
        return len(self.order)

    def place(self, rank: int) -> tuple[int, int]:
        """Index of a rank's node, and index of its device on that node."""
        return self._place_of_device(self.order[rank])

    def device_types(self, num_ranks: int) -> list[DeviceType]:
        """The distinct types among the devices of the first `num_ranks` ranks."""
        if num_ranks not in self._types:
            names = (self.node_type(self.place(rank)[0]).device for rank in range(num_ranks))
            self._types[num_ranks] = [self.devices[name] for name in dict.fromkeys(names)]
        return self._types[num_ranks]

    @cached_property
    def _types(self) -> dict[int, list[DeviceType]]:
        """Cache of `device_types` by number of ranks: every block of every stage asks for it."""
        return {}


def on_devices(cluster: Cluster, devices: Sequence[int]) -> PlacedCluster:
    """Let rank r be device `devices[r]` of a cluster. Raises ClusterError for a missing device."""
    cluster.check_fits(max(devices) + 1, f"a plan that uses device {max(devices)}")
    known = {f.name: getattr(cluster, f.name) for f in fields(Cluster)}
    return PlacedCluster(**known, order=tuple(devices))


def likeness(cluster: PlacedCluster) -> Hashable:
    """Key that is equal for two clusters whose ranks have the same links, on whichever nodes."""
    places = [cluster.place(rank) for rank in range(cluster.num_devices)]
    numbers = {node: index for index, node in enumerate(dict.fromkeys(node for node, _ in places))}
    return tuple((numbers[node], cluster.node_type(node), place) for node, place in places)
