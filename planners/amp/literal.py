"""AMP's objective as its authors released it, faults and all; for comparison with their numbers.

Where it departs from their paper, or from a cluster as it is (see `corrected`): every stage takes
the mean of the devices' times, whatever it runs on; elements are 4 bytes; a boundary takes the mean
over replicas of the slowest of its tensor ranks, none of which share a NIC; a ring runs at its last
hop's bandwidth; t(m) = m t(1); memory is unlimited; the synchronisation is added after the
partition, and a single micro-batch takes the uniform split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.estimate import BACKWARD, StageCosts, boundaries, micro_batches
from shardweave.planners.amp.model import LayeredModel, Strategy
from shardweave.planners.amp.network import ClusterArrays, Grid
from shardweave.planners.amp.partition import Problem

_BYTES = 4.0


@dataclass(frozen=True)
class LiteralCosts:
    """The published planner's costs."""

    model: LayeredModel
    links: ClusterArrays

    def stage_costs(self, strategy: Strategy, grid: Grid) -> StageCosts:
        tensor, data = strategy.tensor, strategy.data
        names = self.links.names
        by_name = np.stack([self.model.times(name, tensor) for name in names])
        share = np.bincount(self.links.kind, minlength=len(names)) / len(self.links.kind)
        times = BACKWARD * strategy.micro_batch * (share @ by_name)
        between = self.links.slowest[grid[:-1], grid[1:]].min(axis=2) / _BYTES
        outputs = np.array(self.model.outputs[tensor]) * strategy.micro_batch
        last_hop = self.links.slowest[grid[:, -1], grid[:, 0]].min(axis=1) / _BYTES
        problem = Problem(
            times=times[None],
            kinds=(0,) * strategy.pipeline,
            boundary=boundaries(outputs, (1 / between).mean(axis=1)),
            repeats=float(micro_batches(self.model, strategy) - 1),
        )
        return StageCosts(problem, 2 * (data - 1) / data / last_hop)
