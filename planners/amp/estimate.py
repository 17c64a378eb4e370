"""Seconds of a step under a 3D strategy: AMP's objective.

T = (n - 1) max t_i + sum t_i + sum e_i + max sync_i over the stages i, for n micro-batches (AMP,
Eq. 1 and Sec. 4.2): t_i a stage's time for one of them, e_i what crosses the boundary after it,
sync_i the ring all-reduce of its gradients. `costs` fills in t, e and sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.model import LayeredModel, Strategy
from shardweave.planners.amp.partition import Floats, Problem, objective_without_bottleneck
from shardweave.planners.plan.plan_parts import PlanError

BACKWARD = 3.0
"""A step's forward and backward pass, in forward passes (AMP's released planner)."""


@dataclass(frozen=True)
class StageCosts:
    """What the partition of one strategy decides on.

    problem: times, boundaries and memory limits. sync_s: seconds per element of parameters that
    a stage synchronises.
    """

    problem: Problem
    sync_s: Floats


@dataclass(frozen=True)
class Estimate:
    """What a step takes, in seconds, by part.

    compute_s: the slowest stage's share. bubble_s: the other stages once. boundary_s: what
    crosses between stages. sync_s: the gradients' all-reduce.
    """

    strategy: Strategy
    cuts: tuple[int, ...]
    compute_s: float
    bubble_s: float
    boundary_s: float
    sync_s: float

    @property
    def pipeline_s(self) -> float:
        """The step without the gradients' all-reduce: what the published planner minimises."""
        return self.compute_s + self.bubble_s + self.boundary_s

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.sync_s


def estimate(
    model: LayeredModel, strategy: Strategy, costs: StageCosts, cuts: Sequence[int]
) -> Estimate:
    """The estimate of a strategy with given cuts. Raises PlanError if they do not fit it."""
    problem = costs.problem
    stages = strategy.pipeline
    if len(cuts) != stages + 1 or cuts[0] != 0 or cuts[-1] != model.num_layers:
        raise PlanError(
            f"cuts {list(cuts)}: found {len(cuts) - 1} stages ending at layer {cuts[-1]}, expected "
            f"{stages} ending at {model.num_layers}; write 0, the {stages - 1} inner cuts, and "
            f"{model.num_layers}."
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
    """Costs of cutting before each layer, after each stage: stages - 1 x (layers + 1)."""
    after = np.concatenate([[0.0], volumes])
    return np.multiply.outer(seconds_per_unit, after)


def num_micro_batches(model: LayeredModel, strategy: Strategy) -> int:
    """Micro-batches of a step. Raises PlanError if they do not divide the batch."""
    samples = strategy.data * strategy.micro_batch
    if model.batch % samples:
        raise PlanError(
            f"model '{model.name}': a batch of {model.batch} samples does not divide into "
            f"{strategy.data} replicas with micro-batches of {strategy.micro_batch}; use a "
            f"micro-batch that divides {model.batch / strategy.data:g}."
        )
    return strategy.num_micro_batches(model.batch)
