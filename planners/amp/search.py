"""AMP's search: every strategy's best cuts, ranked; other placements; real trials of the best.

Unlike in the paper, where they get equally many, replicas of different speeds get micro-batches in
proportion to their speed. The replicas of a stage are then coordinates of the stage axis
(`planners.schedules.uneven`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.amp.annealing import Annealing, anneal, board_of
from shardweave.planners.amp.costs import (
    Estimate,
    StageCosts,
    corrected_costs,
    estimate,
    slowest_times,
)
from shardweave.planners.amp.memory import Shortfall, shortfall
from shardweave.planners.amp.model import LayeredModel, Strategy, strategies
from shardweave.planners.amp.network import ClusterArrays, Grid, megatron_grid
from shardweave.planners.amp.partition import Ints, Problem, earliest, exact_cuts
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import counted
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Pipeline, PlanError
from shardweave.planners.predict.predict import with_candidates
from shardweave.planners.trials.trials import Deadline, RealTrials, measured


@dataclass(frozen=True)
class Placed:
    """An estimate and its placement. grid: device of each rank, stages x replicas x tensor."""

    estimate: Estimate
    grid: Grid

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


def search_strategies(
    model: LayeredModel,
    cluster: Cluster,
    among: Iterable[Strategy] | None = None,
    *,
    annealing: Annealing | None = None,
    problem: str = "",
) -> list[Placed]:
    """Price every strategy with its best cuts on Megatron's placement; returns the fastest first.

    Objective: seconds of a step (`estimate`). The cuts are exact for their strategy and placement.
    annealing: also tries domino tilings, which is not exact and never slower. among: the
    strategies to price, by default all. problem: the reason why others are left out, for the error
    message.

    Raises PlanError if no strategy fits into memory, naming the one that comes nearest.
    """
    links = ClusterArrays.of(cluster)
    among = strategies(model, cluster) if among is None else among
    grids = {strategy: megatron_grid(strategy) for strategy in among}

    def best_on(strategy: Strategy, grid: Grid) -> Estimate | None:
        return best_cuts(model, strategy, corrected_costs(model, links, strategy, grid))

    placements = [
        Placed(best, grid)
        for strategy, grid in grids.items()
        if (best := best_on(strategy, grid)) is not None
    ]
    if not placements:
        raise PlanError(f"{_nothing_fits(model, links, grids)} {problem}".rstrip())
    placements.sort(key=lambda placed: placed.seconds)
    if annealing is not None:
        fastest = {placed.estimate.strategy: placed for placed in placements}
        annealed = anneal(board_of(links), list(grids), best_on, annealing)
        for strategy, (better, grid) in annealed.items():
            if strategy not in fastest or better.seconds < fastest[strategy].seconds:
                fastest[strategy] = Placed(better, grid)
        placements = sorted(fastest.values(), key=lambda placed: placed.seconds)
    return placements


def _nothing_fits(model: LayeredModel, links: ClusterArrays, grids: dict[Strategy, Grid]) -> str:
    if not grids:
        return (
            f"model '{model.name}' on cluster '{links.cluster.name}': no strategy uses all "
            f"{links.cluster.num_devices} devices with a batch of {model.batch} and tensor degrees "
            f"{model.degrees}; change the batch or the number of devices."
        )
    nearest: Shortfall = min(
        (shortfall(model, links, strategy, grid) for strategy, grid in grids.items()),
        key=lambda s: s.missing_bytes,
    )
    return (
        f"model '{model.name}' does not fit into the memory of cluster '{links.cluster.name}': "
        f"nearest is {nearest}; use more devices, or devices with more memory."
    )


def best_cuts(model: LayeredModel, strategy: Strategy, costs: StageCosts) -> Estimate | None:
    """Find the cuts with the fastest step, gradients' all-reduce included; exact; None if none fit.

    Each round finds the cuts with the fastest pipeline whose all-reduce is faster than the last
    round's. The search ends once the pipeline and the least possible all-reduce take longer than
    the best step so far. Takes O(k L^2) rounds at worst, usually two or three.
    """
    best: Estimate | None = None
    problem = costs.problem
    counts = np.array(model.parameters[strategy.tensor])
    least = float(counts.sum() / (1 / costs.sync_s).sum()) if costs.sync_s.all() else 0.0
    while True:
        cut = exact_cuts(problem)
        if cut is None:
            return best
        if best is not None and cut.seconds + least >= best.seconds:
            return best
        priced = estimate(model, strategy, costs, cut.cuts)
        if best is None or priced.seconds < best.seconds:
            best = priced
        if priced.sync_s <= least or strategy.pipeline == 1:
            return best
        problem = _synchronising_faster(problem, costs, counts.tolist(), priced.sync_s)


def _synchronising_faster(
    problem: Problem, costs: StageCosts, counts: Sequence[float], sync_s: float
) -> Problem:
    """Restrict the problem to stages that synchronise in less than `sync_s` seconds."""
    prefix = np.concatenate([[0.0], np.cumsum(counts)])
    most: list[float] = (sync_s * (1 - 1e-9) / costs.sync_s).tolist()
    first: Ints = np.stack([earliest(prefix, limit) for limit in most])
    if problem.first is not None:
        first = np.maximum(first, problem.first)
    return replace(problem, first=first)


def fastest_tried(
    trials: RealTrials,
    plans: Sequence[Plan],
    estimated: Sequence[Candidate],
    top: int,
    limit: Deadline,
) -> Plan:
    """Run real trials; return the fastest plan, with notes on failures. PlanError if none ran."""
    names = [c.name for c in estimated]
    outcomes = list(limit.each(trials.run, plans))
    plans = plans[: len(outcomes)]
    ran = [index for index, outcome in enumerate(outcomes) if outcome.status == "ok"]
    failed = [
        f"{names[index]}: {outcome.status.replace('_', ' ')}: {outcome.message}"
        for index, outcome in enumerate(outcomes)
        if outcome.status != "ok"
    ]
    if not ran:
        best = counted(len(plans), "best estimate")
        raise PlanError(
            f"none of the plans with the {best} ran in a real trial; try more plans, or give a "
            f"longer time limit. First failure: {failed[0]}"
        )
    capacity = estimated[0].predicted.capacity_bytes
    tried = {i: replace(measured(outcomes[i]), capacity_bytes=capacity) for i in ran}
    ran.sort(key=lambda index: tried[index].time_s)
    rows = [Candidate(names[index], tried[index]) for index in ran]
    reason = (
        f"the {counted(len(plans), 'best estimate', 'was')} tried, {len(ran)} ran, and of those "
        f"this one is the fastest (number {ran[0] + 1} by estimate)"
    )
    plan = replace(plans[ran[0]], reasons=(reason, *plans[ran[0]].reasons))
    ranked = with_candidates(plan, rows[: max(1, top)])
    return replace(ranked, notes=(*ranked.notes, *failed))


def with_shares(
    plan: Plan, program: Program, placed: Placed, model: LayeredModel, links: ClusterArrays
) -> Plan | None:
    """Copy a placement's plan so that each replica runs micro-batches in proportion to its speed.
    Returns None if all replicas get equally many, or if the plan uses ZeRO, where they must."""
    strategy, pipeline = placed.estimate.strategy, plan.pipeline
    if strategy.data == 1 or plan.zero:
        return None
    count = strategy.data * strategy.num_micro_batches(model.batch)
    shares = tuple(
        shares_by_seconds(own, count) for own in _seconds_of_replicas(placed, model, links)
    )
    if all(len(set(own)) == 1 for own in shares):
        return None
    mesh = Mesh(stage=strategy.pipeline * strategy.data, tensor=strategy.tensor)
    if pipeline is None:
        ranks = tuple(map(int, placed.grid.flat))
        is_moved = ranks != tuple(range(len(ranks)))
        pipeline = Pipeline((("*",),), ranks=(ranks,) if is_moved else ())
    return replace(
        plan_megatron(program, mesh),
        planner=plan.planner,
        pipeline=replace(pipeline, micro_batches=count, shares=shares),
    )


def _seconds_of_replicas(
    placed: Placed, model: LayeredModel, links: ClusterArrays
) -> list[list[float]]:
    """By stage, the seconds of a micro-batch on each replica: on its slowest device."""
    strategy, times = placed.estimate.strategy, list[list[float]]()
    for stage, (left, right) in zip(placed.grid, pairwise(placed.estimate.cuts), strict=True):
        seconds: list[float] = []
        for replica in stage:
            kinds: list[int] = links.kind[replica].tolist()
            names = [links.names[kind] for kind in dict.fromkeys(kinds)]
            seconds.append(float(slowest_times(model, names, strategy)[left:right].sum()))
        times.append(seconds)
    return times


def shares_by_seconds(seconds: Sequence[float], count: int) -> tuple[int, ...]:
    """Divide `count` micro-batches among replicas so that the last replica finishes the soonest.

    seconds: of one micro-batch, by replica. Each replica runs one; every other one goes to the
    replica that would finish it first. This is exact: if a replica ran fewer, another would have to
    run one that it finishes later.
    """
    shares = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        ends = [(number + 1) * s for number, s in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)
