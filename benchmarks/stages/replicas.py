"""What the replicas of a stage send each other of parameters and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from shardweave.benchmarks.stages.events import Message
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.model import CostModel

SyncStep = Literal["gather", "scatter", "sum"]
"""Shards that ZeRO divides into are gathered, and gradients scattered to them; what is not divided,
or further replicas have too, is summed."""

Sync = tuple[SyncStep, ...]

Nic = tuple[Literal["out", "in"], int]
"""One direction of a node's network adapters."""


@dataclass(frozen=True)
class ReplicaLinks:
    """links: of a stage's devices, by its mesh. divided: the axes over which ZeRO divides, none
    without it. summed: those over which gradients are summed. gradient_scale: bytes of a gradient
    as it is sent, over those of its parameter."""

    links: CostModel
    divided: tuple[str, ...]
    summed: tuple[str, ...]
    gradient_scale: float

    def message(self, steps: Sync, size: float) -> Message | None:
        """The messages of steps for parameters of `size` bytes, one behind the other, as one; None
        if there are none."""
        found = map(self._sent, steps, repeat(size))
        sent = [one for one in found if size and self.links.mesh.sizes(one[1]) > 1]
        if not sent:
            return None
        seconds = sum(self.links.sync_time_s(*one) for one in sent)
        crosses = any(self.links.ring_over(axes).nodes > 1 for _, axes, _ in sent)
        return Message(seconds, _nics_of(self.links.cluster) if crosses else ())

    def _sent(self, step: SyncStep, size: float) -> tuple[str, tuple[str, ...], float]:
        """The collective of a step, its axes, and of how many bytes it is."""
        divided = self._in_mesh(self.divided)
        if step == "gather":
            return "all_gather", divided, size
        size *= self.gradient_scale
        if step == "scatter":
            return "reduce_scatter", divided, size
        rest = self._in_mesh(tuple(axis for axis in self.summed if axis not in divided))
        return "all_reduce", rest, size / self.links.mesh.sizes(divided)

    def _in_mesh(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.links.mesh.names)


def _nics_of(cluster: Cluster) -> tuple[Nic, ...]:
    """The NICs of all nodes, which rings of all ranks occupy both ways."""
    nodes = sorted({cluster.place(rank)[0] for rank in range(cluster.num_devices)})
    return (*(("out", node) for node in nodes), *(("in", node) for node in nodes))


def nics_between(
    cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]
) -> tuple[Nic, ...]:
    """The NICs that messages occupy which are sent at the same time."""
    pairs = zip(senders, receivers, strict=True)
    nodes = [(cluster.place(left)[0], cluster.place(right)[0]) for left, right in pairs]
    crossing = [(left, right) for left, right in nodes if left != right]
    leaving = dict.fromkeys(left for left, _ in crossing)
    entering = dict.fromkeys(right for _, right in crossing)
    return (*(("out", node) for node in leaving), *(("in", node) for node in entering))
