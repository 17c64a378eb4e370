"""Seconds of a step under a 3D strategy (AMP's objective), from a model, links and a placement.

T = (n - 1) max t_i + sum t_i + sum e_i + max sync_i over the stages i, for n micro-batches (AMP,
Eq. 1 and Sec. 4.2): t_i is a stage's time for a micro-batch, e_i the time to send across the
boundary after it, sync_i that of the ring all-reduce of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.memory import first_layers
from shardweave.planners.amp.model import LayeredModel, Strategy
from shardweave.planners.amp.network import (
    ClusterArrays,
    Grid,
    boundary_bandwidths,
    ring_bandwidths,
)
from shardweave.planners.amp.partition import Floats, Problem, objective_without_bottleneck
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.plan.zero import ring_passes

BACKWARD = 3.0
"""Time of a forward and a backward pass, in units of a forward pass (as AMP's released planner)."""


@dataclass(frozen=True)
class StageCosts:
    """Costs from which the stages of one strategy are chosen.

    problem: layer times, boundary times and memory limits. sync_s: by stage, seconds to all-reduce
    the gradient of one parameter element.
    """

    problem: Problem
    sync_s: Floats


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of a step, by part.

    compute_s: compute of the slowest stage. bubble_s: one micro-batch's passes through the other
    stages. boundary_s: sends between stages. sync_s: the gradients' all-reduce.
    """

    strategy: Strategy
    cuts: tuple[int, ...]
    compute_s: float
    bubble_s: float
    boundary_s: float
    sync_s: float

    @property
    def pipeline_s(self) -> float:
        """Seconds without the gradients' all-reduce, as the published planner minimises."""
        return self.compute_s + self.bubble_s + self.boundary_s

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.sync_s


def estimate(
    model: LayeredModel, strategy: Strategy, costs: StageCosts, cuts: Sequence[int]
) -> Estimate:
    """Estimate a strategy with given cuts between layers. PlanError if they do not fit it."""
    problem = costs.problem
    stages = strategy.pipeline
    if len(cuts) != stages + 1 or cuts[0] != 0 or cuts[-1] != model.num_layers:
        raise PlanError(
            f"cuts {list(cuts)} make {len(cuts) - 1} stages that end at layer {cuts[-1]}, "
            f"expected {stages} stages that end at layer {model.num_layers}; write 0, the "
            f"{stages - 1} inner cuts, and {model.num_layers}."
        )
    times = [
        float(problem.times[kind, cuts[s] : cuts[s + 1]].sum())
        for s, kind in enumerate(problem.kinds)
    ]
    slowest = max(times)
    parameters = np.array(model.stage_parameters(cuts, strategy.tensor))
    return Estimate(
        strategy=strategy,
        cuts=tuple(cuts),
        compute_s=(problem.repeats + 1) * slowest,
        bubble_s=sum(times) - slowest,
        boundary_s=objective_without_bottleneck(problem, cuts) - sum(times),
        sync_s=float((costs.sync_s * parameters).max()),
    )


def boundaries(volumes: Floats, seconds_per_unit: Floats) -> Floats:
    """Seconds that a cut before each layer takes to send: stage boundaries x (layers + 1)."""
    after = np.concatenate([[0.0], volumes])
    return np.multiply.outer(seconds_per_unit, after)


def num_micro_batches(model: LayeredModel, strategy: Strategy) -> int:
    """Number of micro-batches per replica in a step. PlanError if they do not divide the batch."""
    samples = strategy.data * strategy.micro_batch
    if model.batch % samples:
        raise PlanError(
            f"model '{model.name}': a batch of {model.batch} samples does not divide into "
            f"{strategy.data} replicas with micro-batches of {strategy.micro_batch}; use replicas "
            "and micro-batches whose product divides the batch."
        )
    return strategy.num_micro_batches(model.batch)


Costs = Callable[[LayeredModel, ClusterArrays, Strategy, Grid], StageCosts]
"""Function that gives the costs of a strategy's stages on a placement."""


def corrected_costs(
    model: LayeredModel, links: ClusterArrays, strategy: Strategy, grid: Grid
) -> StageCosts:
    """Compute the costs of a strategy's stages on the cluster as it is.

    Differences from the published planner (`benchmarks/amp_literal.py`): each stage takes the times
    of its own devices, for mixed types layer by layer the slowest; sizes are in bytes of the dtype;
    a boundary carries activations forward and gradients back, and each tensor rank sends its
    share, or all that it holds (`LayeredModel.sent`); concurrent flows share the NICs, and the
    slowest hop of a boundary or ring counts; a layer's time grows with the micro-batch m as t(m) =
    t(1) (phi + (1 - phi) m), where phi is the fixed share of t(1), such as kernel launches and the
    host's work to issue them; stages that do not fit into memory are left out; the all-reduce of
    gradients is part of the objective (`search`). Nothing is fitted to measured steps.
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
    """Seconds of a micro-batch's two passes, by layer, on the slowest of some devices."""
    seconds: list[Floats] = []
    for device in devices:
        once, fixed = model.times(device, strategy.tensor), model.fixed_shares(device, strategy)
        seconds.append(once * (fixed + (1 - fixed) * strategy.micro_batch))
    return BACKWARD * np.max(seconds, axis=0)
