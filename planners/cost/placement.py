"""Some of a cluster's devices, as a cluster of their own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from shardweave.planners.cost.cluster import Cluster, DeviceType


@dataclass(frozen=True)
class PlacedCluster(Cluster):
    """A cluster whose rank r is device `order[r]`; nodes, links and NICs stay what they are."""

    order: tuple[int, ...] = ()

    @cached_property
    def num_devices(self) -> int:
        return len(self.order)

    def place(self, rank: int) -> tuple[int, int]:
        """The node that a rank is on, and which device of it."""
        return self._place_of_device(self.order[rank])

    def device_types(self, num_ranks: int) -> list[DeviceType]:
        """The distinct types among the devices of the first `num_ranks` ranks."""
        names = (self.node_type(self.place(rank)[0]).device for rank in range(num_ranks))
        return [self.devices[name] for name in dict.fromkeys(names)]


def on_devices(cluster: Cluster, devices: Sequence[int]) -> PlacedCluster:
    """These devices, by number, in this order. Raises ClusterError for one that is not there."""
    cluster.check_fits(max(devices) + 1, f"a plan that uses device {max(devices)}")
    known = {one.name: getattr(cluster, one.name) for one in fields(Cluster)}
    return PlacedCluster(**known, order=tuple(devices))


def likeness(cluster: PlacedCluster) -> Hashable:
    """Equal for devices that are joined alike: nodes are numbered as the ranks meet them."""
    places = [cluster.place(rank) for rank in range(cluster.num_devices)]
    numbers = {node: index for index, node in enumerate(dict.fromkeys(node for node, _ in places))}
    return tuple((numbers[node], cluster.node_type(node), place) for node, place in places)
