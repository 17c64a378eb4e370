"""AMP's model of a program: a chain of layers with profiled times, and a strategy for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from shardweave.planners.amp.partition import Floats
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.plan.zero import divided


@dataclass(frozen=True)
class Tied:
    """Parameters that two layers share; counted at both, but once if one stage has both.

    counts: number of elements on one device, by tensor degree.
    """

    first: int
    second: int
    counts: Mapping[int, float]


ByDegree = Mapping[int, tuple[float, ...]]
"""By tensor degree, a value for each layer."""


@dataclass(frozen=True)
class LayeredModel:
    """A chain of L layers, described by numbers; those that depend on the tensor degree are by
    degree.

    batch: samples of one step over all devices. profile: by device type, seconds of each layer's
    forward pass on one sample. outputs: elements of each layer's output for one sample, as the
    published planner counts them. parameters: elements of each layer's parameters. kept_bytes:
    activations of a sample kept until the layer's backward pass. sent: elements of the output that
    each tensor rank sends; None: its share of `outputs` at degree 1, which the ranks of the next
    stage gather. repeated: index of the first of the equal layers, and their number, for the
    uniform split. tied: shared parameters. fixed: share of a layer's time that does not grow with
    the micro-batch, by device type; None: 0. itemsize: bytes of an element. state_bytes: bytes of a
    parameter's state, by part. workspace_bytes: workspace of the layer's largest op on one sample.
    keeps_all: without stages, a step holds the activations of all its micro-batches at once, as
    `split-batch` does.
    """

    name: str
    batch: int
    profile: Mapping[str, ByDegree]
    outputs: ByDegree
    parameters: ByDegree
    kept_bytes: ByDegree
    repeated: tuple[int, int]
    tied: tuple[Tied, ...] = ()
    fixed: Mapping[str, ByDegree] | None = None
    sent: ByDegree | None = None
    itemsize: int = 2
    state_bytes: Mapping[str, float] = field(
        default_factory=lambda: state_bytes(2, 2, "fp16-mixed")
    )
    workspace_bytes: ByDegree | None = None
    keeps_all: bool = False
    zero: int = 0

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.outputs.values())))

    @property
    def degrees(self) -> list[int]:
        return sorted(self.outputs)

    def times(self, device: str, tensor: int) -> Floats:
        """Forward seconds of one sample, by layer. Raises PlanError if a device has no profile."""
        if device not in self.profile or tensor not in self.profile[device]:
            raise PlanError(
                f"model '{self.name}' has no profile on device '{device}' at tensor degree "
                f"{tensor}; it has {', '.join(self.profile)} at {self.degrees}."
            )
        return np.array(self.profile[device][tensor])

    def fixed_shares(self, device: str, strategy: Strategy) -> Floats:
        """By layer, the share (phi) of its time that is independent of the micro-batch."""
        if self.fixed is None:
            return np.zeros(self.num_layers)
        return np.array(self.fixed[device][strategy.tensor])

    def sent_elements(self, tensor: int) -> Floats:
        """By layer, the elements of its output that one tensor rank sends for one sample."""
        if self.sent is None:
            return np.array(self.outputs[1]) / tensor
        return np.array(self.sent[tensor])

    def state_of(self, strategy: Strategy) -> dict[str, float]:
        """Bytes of state per parameter, by part, on one of a strategy's replicas."""
        return divided(self.state_bytes, self.zero, strategy.data)

    def stage_parameters(self, cuts: Sequence[int], tensor: int) -> list[float]:
        """Elements of the parameters of each stage, on one device."""
        counts = self.parameters[tensor]
        totals = [sum(counts[left:right]) for left, right in pairwise(cuts)]
        for shared in self.tied:
            for stage, (left, right) in enumerate(pairwise(cuts)):
                if left <= shared.first and shared.second < right:
                    totals[stage] -= shared.counts[tensor]
        return totals


@dataclass(frozen=True)
class Strategy:
    """Degrees of parallelism; micro_batch: the number of samples that a replica runs at once."""

    pipeline: int
    data: int
    tensor: int
    micro_batch: int

    def num_micro_batches(self, batch: int) -> int:
        """Micro-batches of one step of `batch` samples, on each replica."""
        return batch // (self.data * self.micro_batch)


def strategies(model: LayeredModel, cluster: Cluster) -> Iterator[Strategy]:
    """Yield every strategy that uses all devices: AMP's search space, Sec. 4.1.

    The tensor degree stays within a node and has been profiled; data times micro-batch divides the
    batch; there are no more stages than layers.
    """
    devices = cluster.num_devices
    sizes = {cluster.node_type(node).devices for node in range(cluster.num_nodes)}
    for tensor in model.degrees:
        if any(size % tensor for size in sizes):
            continue
        for data in divisors(devices // tensor):
            pipeline = devices // (tensor * data)
            if model.batch % data or pipeline > model.num_layers:
                continue
            for micro_batch in divisors(model.batch // data):
                yield Strategy(pipeline, data, tensor, micro_batch)
