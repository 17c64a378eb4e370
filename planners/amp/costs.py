"""What AMP's stages take on a placement: on the cluster as it is, and as the released planner says.

Both are a function of a model, the links, a strategy and its placement.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardweave.planners.amp.estimate import BACKWARD, StageCosts, boundaries, micro_batches
from shardweave.planners.amp.memory import first_layers
from shardweave.planners.amp.model import LayeredModel, Strategy
from shardweave.planners.amp.network import (
    ClusterArrays,
    Grid,
    boundary_bandwidths,
    ring_bandwidths,
)
from shardweave.planners.amp.partition import Floats, Problem
from shardweave.planners.plan.zero import passes

Costs = Callable[[LayeredModel, ClusterArrays, Strategy, Grid], StageCosts]
"""How the stages of a strategy on a placement are costed."""

_LITERAL_BYTES = 4.0


def corrected_costs(
    model: LayeredModel, links: ClusterArrays, strategy: Strategy, grid: Grid
) -> StageCosts:
    """Costs on the cluster as it is.

    Against the published planner (`literal_costs`): each stage takes the times of the devices that
    it runs on, of mixed ones layer by layer the slowest; sizes are in bytes of the dtype, and a
    boundary carries activations forward and gradients back, of which each tensor rank sends its
    share, or what it has (`LayeredModel.sent`); flows that run at once share the NICs, and the
    slowest hop counts, of a boundary and of a ring; a layer's time is affine in the micro-batch,
    t(m) = t(1) (phi + (1 - phi) m), where phi is the share of t(1) that is there whatever the size,
    such as kernel launches and the host that issues them; stages that do not fit into memory are
    left out; the synchronisation is part of what the partition minimises (`search`). Nothing is
    fitted to steps that were measured.
    """
    mixes: list[tuple[int, ...]] = [tuple(np.unique(links.kind[stage]).tolist()) for stage in grid]
    kinds = list(dict.fromkeys(mixes))
    names = [[links.names[kind] for kind in mix] for mix in kinds]
    sent = model.sent_elements(strategy.tensor) * model.itemsize * strategy.micro_batch
    problem = Problem(
        times=np.stack([slowest_times(model, devices, strategy) for devices in names]),
        kinds=tuple(kinds.index(mix) for mix in mixes),
        boundary=boundaries(sent, 2 / boundary_bandwidths(links, grid)),
        repeats=float(micro_batches(model, strategy) - 1),
        first=first_layers(model, links, strategy, grid),
    )
    rounds = passes(model.zero, micro_batches(model, strategy))
    share = (strategy.data - 1) / strategy.data
    return StageCosts(problem, rounds * share * model.itemsize / ring_bandwidths(links, grid))


def slowest_times(model: LayeredModel, devices: list[str], strategy: Strategy) -> Floats:
    """Seconds of a micro-batch, forward and backward, by layer, on devices of some types."""
    found: list[Floats] = []
    for device in devices:
        once, fixed = model.times(device, strategy.tensor), model.fixed_shares(device, strategy)
        found.append(once * (fixed + (1 - fixed) * strategy.micro_batch))
    return BACKWARD * np.max(found, axis=0)


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
    between = links.slowest[grid[:-1], grid[1:]].min(axis=2) / _LITERAL_BYTES
    outputs = np.array(model.outputs[tensor]) * strategy.micro_batch
    last_hop = links.slowest[grid[:, -1], grid[:, 0]].min(axis=1) / _LITERAL_BYTES
    problem = Problem(
        times=times[None],
        kinds=(0,) * strategy.pipeline,
        boundary=boundaries(outputs, (1 / between).mean(axis=1)),
        repeats=float(micro_batches(model, strategy) - 1),
    )
    return StageCosts(problem, 2 * (data - 1) / data / last_hop)
