"""AMP's planner as its authors released it, to compare with their numbers."""

from __future__ import annotations

import numpy as np

from shardweave.planners.amp.costs import (
    BACKWARD,
    Estimate,
    StageCosts,
    boundaries,
    estimate,
    num_micro_batches,
)
from shardweave.planners.amp.model import LayeredModel, Strategy, strategies
from shardweave.planners.amp.network import ClusterArrays, Grid, megatron_grid
from shardweave.planners.amp.partition import Floats, Problem, exact_cuts
from shardweave.planners.cost.cluster import Cluster

BYTES = 4.0


def slowest_links(links: ClusterArrays) -> Floats:
    """Between any two devices, with the NICs to itself; infinite from a device to itself."""
    between = np.minimum.outer(links.nic[links.node], links.nic[links.node])
    same = np.equal.outer(links.node, links.node)
    return np.where(same, links.inside, between)


def literal_costs(
    model: LayeredModel, links: ClusterArrays, strategy: Strategy, grid: Grid
) -> StageCosts:
    """AMP's objective as its authors released it, faults and all; to compare with their numbers.

    Where it departs from their paper, or from a cluster as it is: every stage takes the mean of
    the devices' times, whatever it runs on; elements are 4 bytes; a boundary takes the mean over
    replicas of the slowest of its tensor ranks, none of which share a NIC; a ring runs at its last
    hop's bandwidth; t(m) = m t(1); memory is unlimited; the synchronisation is added after the
    partition, and a single micro-batch takes the uniform split.
    """
    tensor, data = strategy.tensor, strategy.data
    by_name = np.stack([model.times(name, tensor) for name in links.names])
    share = np.bincount(links.kind, minlength=len(links.names)) / len(links.kind)
    times = BACKWARD * strategy.micro_batch * (share @ by_name)
    slowest = slowest_links(links)
    between = slowest[grid[:-1], grid[1:]].min(axis=2) / BYTES
    outputs = np.array(model.outputs[tensor]) * strategy.micro_batch
    last_hop = slowest[grid[:, -1], grid[:, 0]].min(axis=1) / BYTES
    problem = Problem(
        times=times[None],
        kinds=(0,) * strategy.pipeline,
        boundary=boundaries(outputs, (1 / between).mean(axis=1)),
        repeats=float(num_micro_batches(model, strategy) - 1),
    )
    return StageCosts(problem, 2 * (data - 1) / data / last_hop)


def uniform_cuts(model: LayeredModel, stages: int) -> tuple[int, ...]:
    """The cuts that deal the repeated layers evenly, the first stages taking one more."""
    first, count = model.repeated
    quotient, rest = divmod(count, stages)
    inner = [first + s * quotient + min(s, rest) for s in range(1, stages)]
    return (0, *inner, model.num_layers)


def literal_cuts(model: LayeredModel, strategy: Strategy, costs: StageCosts) -> Estimate:
    """The published planner's choice: the best cuts without the synchronisation."""
    if strategy.pipeline > 1 and costs.problem.repeats == 0:
        return estimate(model, strategy, costs, uniform_cuts(model, strategy.pipeline))
    found = exact_cuts(costs.problem)
    assert found is not None, "without memory limits there are cuts"
    return estimate(model, strategy, costs, found.cuts)


def search_literally(model: LayeredModel, cluster: Cluster) -> list[Estimate]:
    """Every strategy with the cuts that the published planner chooses, the fastest first."""
    links = ClusterArrays.of(cluster)
    found = [
        literal_cuts(model, one, literal_costs(model, links, one, megatron_grid(one)))
        for one in strategies(model, cluster)
    ]
    return sorted(found, key=lambda one: one.seconds)
