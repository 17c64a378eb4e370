"""The costs of AMP's stages on a placement, from a model, the links, and a strategy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardweave.planners.amp.estimate import BACKWARD, StageCosts, boundaries, num_micro_batches
from shardweave.planners.amp.memory import first_layers
from shardweave.planners.amp.model import LayeredModel, Strategy
from shardweave.planners.amp.network import (
    ClusterArrays,
    Grid,
    boundary_bandwidths,
    ring_bandwidths,
)
from shardweave.planners.amp.partition import Floats, Problem
from shardweave.planners.plan.zero import ring_passes

Costs = Callable[[LayeredModel, ClusterArrays, Strategy, Grid], StageCosts]
"""How the stages of a strategy on a placement are costed."""


def corrected_costs(
    model: LayeredModel, links: ClusterArrays, strategy: Strategy, grid: Grid
) -> StageCosts:
    """Costs on the cluster as it is.

    Against the published planner (`benchmarks/amp_literal.py`): each stage takes the times of the
    devices that it runs on, of mixed ones layer by layer the slowest; sizes are in bytes of the
    dtype, and a boundary carries activations forward and gradients back, of which each tensor rank
    sends its share, or what it has (`LayeredModel.sent`); flows that run at once share the NICs,
    and the slowest hop counts, of a boundary and of a ring; a layer's time is affine in the
    micro-batch, t(m) = t(1) (phi + (1 - phi) m), where phi is the share of t(1) that is there
    whatever the size, such as kernel launches and the host that issues them; stages that do not fit
    into memory are left out; the synchronisation is part of what the partition minimises
    (`search`). Nothing is fitted to steps that were measured.
    """
    mixes: list[tuple[int, ...]] = [tuple(np.unique(links.kind[stage]).tolist()) for stage in grid]
    kinds = list(dict.fromkeys(mixes))
    names = [[links.names[kind] for kind in mix] for mix in kinds]
    sent = model.sent_elements(strategy.tensor) * model.itemsize * strategy.micro_batch
    problem = Problem(
        times=np.stack([slowest_times(model, devices, strategy) for devices in names]),
        kinds=tuple(kinds.index(mix) for mix in mixes),
        boundary=boundaries(sent, 2 / boundary_bandwidths(links, grid)),
        repeats=float(num_micro_batches(model, strategy) - 1),
        first=first_layers(model, links, strategy, grid),
    )
    rounds = ring_passes(model.zero, num_micro_batches(model, strategy))
    share = (strategy.data - 1) / strategy.data
    return StageCosts(problem, rounds * share * model.itemsize / ring_bandwidths(links, grid))


def slowest_times(model: LayeredModel, devices: list[str], strategy: Strategy) -> Floats:
    """Seconds of a micro-batch, forward and backward, by layer, on devices of some types."""
    found: list[Floats] = []
    for device in devices:
        once, fixed = model.times(device, strategy.tensor), model.fixed_shares(device, strategy)
        found.append(once * (fixed + (1 - fixed) * strategy.micro_batch))
    return BACKWARD * np.max(found, axis=0)
