"""Memory of AMP's stages, and the shortfall if no cuts fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.planners.amp.model import LayeredModel, Strategy
from shardweave.planners.amp.network import ClusterArrays, Grid
from shardweave.planners.amp.partition import Floats, Ints, Problem, earliest, exact_cuts
from shardweave.planners.cost.quantity import gib
from shardweave.planners.plan.zero import whole_for_a_while


@dataclass(frozen=True)
class Shortfall:
    """The reason why a strategy does not fit into memory, with the cuts that come nearest to it.

    stage: the stage that takes the largest share of its device's memory. parts: that stage's bytes.
    capacity_bytes: memory of its smallest device.
    """

    strategy: Strategy
    cuts: tuple[int, ...]
    stage: int
    parts: Mapping[str, float]
    capacity_bytes: float

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the stage exceeds its device's memory; negative if it fits."""
        return sum(self.parts.values()) - self.capacity_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items())
        return (
            f"pipeline {self.strategy.pipeline}, data {self.strategy.data}, tensor "
            f"{self.strategy.tensor}, micro-batch {self.strategy.micro_batch}: stage {self.stage} "
            f"needs {gib(sum(self.parts.values()))} GiB ({parts}) of "
            f"{gib(self.capacity_bytes)} GiB, {gib(self.missing_bytes)} GiB too many"
        )


def capacities(links: ClusterArrays, grid: Grid) -> Floats:
    memory = np.array([links.cluster.devices[name].memory_bytes for name in links.names])
    return memory[links.kind[grid]].min(axis=(1, 2)).astype(np.float64)


def layer_bytes(model: LayeredModel, strategy: Strategy) -> Floats:
    """Bytes that each layer takes on each stage: stages x layers.

    Stage s of S holds the activations of S - s micro-batches at once, or of all if a step has fewer
    (1F1B; Narayanan et al. 2021, Sec. 2.2).
    """
    states = sum(model.state_of(strategy).values()) * np.array(model.parameters[strategy.tensor])
    kept = strategy.micro_batch * np.array(model.kept_bytes[strategy.tensor])
    return states + np.multiply.outer(_in_flight(model, strategy), kept)


def workspace(model: LayeredModel, strategy: Strategy) -> float:
    """Workspace bytes of the op that needs most, which every stage reserves."""
    if model.workspace_bytes is None:
        return 0.0
    return strategy.micro_batch * max(model.workspace_bytes[strategy.tensor])


def whole_bytes(model: LayeredModel, strategy: Strategy) -> float:
    """Bytes of the largest layer's gradients and parameters while ZeRO holds them unsharded."""
    if strategy.data == 1:
        return 0.0
    largest = max(model.parameters[strategy.tensor])
    return whole_for_a_while(model.zero) * largest * model.state_bytes["gradients"]


def _in_flight(model: LayeredModel, strategy: Strategy) -> Floats:
    most = strategy.num_micro_batches(model.batch)
    if strategy.pipeline == 1 and model.keeps_all:
        return np.array([most], dtype=np.float64)
    return np.minimum(most, np.arange(strategy.pipeline, 0, -1)).astype(np.float64)


def first_layers(model: LayeredModel, links: ClusterArrays, strategy: Strategy, grid: Grid) -> Ints:
    """By stage and end j, the first layer of the longest stage before layer j that fits.

    Shape: stages x (layers + 1); j + 1 if layer j - 1 alone is too large. Tied parameters are
    counted at both layers, unless there is only one stage.
    """
    sizes = layer_bytes(model, strategy)
    if strategy.pipeline == 1:
        for shared in model.tied:
            states = sum(model.state_of(strategy).values()) * shared.counts[strategy.tensor]
            sizes[0, shared.second] -= states
    prefix = np.zeros((strategy.pipeline, model.num_layers + 1))
    np.cumsum(sizes, axis=1, out=prefix[:, 1:])
    reserved = workspace(model, strategy) + whole_bytes(model, strategy)
    limits = (capacities(links, grid) - reserved).tolist()
    return np.stack([earliest(row, limit) for row, limit in zip(prefix, limits, strict=True)])


def shortfall(
    model: LayeredModel, links: ClusterArrays, strategy: Strategy, grid: Grid
) -> Shortfall:
    """Find the cuts whose fullest stage is least full, exactly; return that stage."""
    capacity = capacities(links, grid)
    sizes = layer_bytes(model, strategy)
    no_cost = np.zeros((strategy.pipeline - 1, model.num_layers + 1))
    # The bottleneck outweighs all else that the partition minimises.
    weight = 1e6
    fit = exact_cuts(Problem(sizes / capacity[:, None], range(strategy.pipeline), no_cost, weight))
    assert fit is not None, "a strategy has no more stages than layers"
    used = stage_bytes(model, strategy, fit.cuts)
    totals = [sum(parts.values()) / capacity[s] for s, parts in enumerate(used)]
    stage = int(np.argmax(totals))
    return Shortfall(strategy, fit.cuts, stage, used[stage], float(capacity[stage]))


def stage_bytes(
    model: LayeredModel, strategy: Strategy, cuts: Sequence[int]
) -> list[dict[str, float]]:
    parameters = model.stage_parameters(cuts, strategy.tensor)
    kept = strategy.micro_batch * np.array(model.kept_bytes[strategy.tensor])
    parts_of: list[dict[str, float]] = []
    for stage, in_flight in enumerate(_in_flight(model, strategy).tolist()):
        activations = in_flight * float(kept[cuts[stage] : cuts[stage + 1]].sum())
        parts = {name: size * parameters[stage] for name, size in model.state_of(strategy).items()}
        parts |= {"activations": activations, "workspace": workspace(model, strategy)}
        if whole := whole_bytes(model, strategy):
            parts["communication"] = whole
        parts_of.append(parts)
    return parts_of
