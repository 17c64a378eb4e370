"""The planner `amp`: AMP's search on a program and a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.amp.annealing import Annealing
from shardweave.planners.amp.costs import BACKWARD
from shardweave.planners.amp.memory import capacities, stage_bytes
from shardweave.planners.amp.model import Strategy, strategies
from shardweave.planners.amp.network import ClusterArrays, Grid
from shardweave.planners.amp.profile import ProgramProfile, profile_program
from shardweave.planners.amp.search import (
    Placed,
    fastest_tried,
    search_strategies,
    with_shares,
)
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import asked_degrees, divisors
from shardweave.planners.cost.memory import check_plan_precision
from shardweave.planners.cost.quantity import counted, seconds_text
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import plan_megatron, why_not_one_by_one
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Pipeline, PlanError, Predicted
from shardweave.planners.plan.zero import DIVIDED
from shardweave.planners.predict.predict import predict_plan, why_slower, with_candidates
from shardweave.planners.trials.trials import Deadline, Host, RealTrials, launch_of

AXES = ("pipeline", "data", "tensor")


def plan_amp(
    program: Program | Lowerings,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    host: Host | None = None,
    max_stages: int | None = None,
    max_tensor: int | None = None,
    anneal: int = 0,
    zero: int = 0,
    precision: str = "",
    simulate: int = 3,
    trials: int = 0,
    steps: int = 5,
    time_limit_s: float = 0.0,
    trial_limit_s: float = 120.0,
    slow: float = 2.0,
    top: int = 5,
) -> Plan:
    """Degrees of pipeline, data and tensor parallelism, micro-batches, stages and placement.

    Objective: seconds of one step (`amp.estimate`), over every strategy that uses all devices of
    the cluster, or those of `mesh` (axes pipeline, data, tensor). The stages of a strategy are
    exact for its placement; so is the choice among strategies, within the estimate. Memory is a
    constraint. Source: Li et al., AMP, NeurIPS 2022; departures are in docs/planners.md.

    max_stages: the most pipeline stages. max_tensor: the largest tensor degree. anneal: number of
    steps of AMP's annealing over strategies and domino tilings (`amp.annealing`); not exact. zero:
    the ZeRO stage, for memory and for what replicas send. precision: a plan's precision, for the
    memory of the optimizer. simulate: how many of the best estimates are simulated; where replicas
    differ in speed, each also with micro-batches in proportion (`amp.shares`). The fastest of
    these, with its simulated time, is the plan; 0 takes the best estimate. trials: how many of the
    best estimates train on local processes instead, each for `steps` steps within `trial_limit_s`
    seconds and ended early by `slow` (`oppa.planner.TrialOptions`). time_limit_s: seconds after
    which no simulation or trial begins, except the first; 0: no limit. top: number of candidates
    that the plan lists.

    Raises PlanError if no strategy fits, with the smallest shortfall of memory in GiB by part, if
    there is nothing to train, and if no trial runs.
    """
    limit = Deadline(time_limit_s)
    if zero not in range(len(DIVIDED)):
        raise PlanError(f"zero is {zero}; use 0, 1, 2 or 3.")
    sizes = asked_degrees(mesh, AXES, "amp")
    degrees = _tensor_degrees(cluster, sizes, max_tensor)
    check_plan_precision(precision)
    lowerings = Lowerings.of(program)
    program = lowerings.program
    profile = profile_program(lowerings, cluster, degrees, precision)
    profile = replace(profile, model=replace(profile.model, zero=zero))
    wanted = [s for s in strategies(profile.model, cluster) if _is_wanted(sizes, max_stages, s)]
    joined = _why_joined(program, profile, cluster, wanted)
    placements = search_strategies(
        profile.model,
        cluster,
        [s for s in wanted if not (joined and _runs_in_turn(s, profile))],
        annealing=Annealing(steps=anneal) if anneal else None,
        problem=joined,
    )
    links = ClusterArrays.of(cluster)
    shown = max(1, top, simulate, trials)
    rows = [
        Candidate(_name(p.estimate.strategy, profile), _predicted(p, profile, links))
        for p in placements[:shown]
    ]
    reason = (
        f"{len(placements)} strategies fit into memory, of {cluster.name}'s {cluster.num_devices} "
        "devices; "
    )
    plans = [
        replace(_plan(program, p, profile, links), precision=precision)
        for p in placements[: trials or max(1, simulate)]
    ]
    if trials:
        real = RealTrials(launch_of(host, "amp"), steps, trial_limit_s, slow)
        return fastest_tried(real, plans, rows, top, limit)
    if simulate < 1:
        plan = with_candidates(plans[0], rows[: max(1, top)])
        why = "this one has the least estimated time"
    else:
        shared = {
            index: replace(uneven, precision=precision)
            for index, plan in enumerate(plans)
            if not joined
            and (uneven := with_shares(plan, program, placements[index], profile.model, links))
            is not None
        }
        plan, why = _fastest(lowerings, cluster, rows, plans, shared, max(1, top), limit)
    return replace(plan, reasons=(reason + why, *plan.reasons))


def _fastest(
    lowerings: Lowerings,
    cluster: Cluster,
    estimated: Sequence[Candidate],
    plans: Sequence[Plan],
    shared: Mapping[int, Plan],
    top: int,
    limit: Deadline,
) -> tuple[Plan, str]:
    """The fastest of `plans` by simulation, and why. shared: variants with micro-batches in
    proportion to speed, by index of the plan. Its candidates are all `estimated` plans, the
    simulated ones first."""
    tried = [(index, "", plan) for index, plan in enumerate(plans)]
    tried += [(index, ", micro-batches in proportion", plan) for index, plan in shared.items()]
    simulated = list(limit.each(lambda trial: predict_plan(lowerings, trial[2], cluster), tried))
    tried, plans = tried[: len(simulated)], plans[: len(simulated)]
    # A sort is stable: of plans that take as long, the least estimate comes first.
    order = sorted(range(len(tried)), key=lambda i: (not simulated[i].fits, simulated[i].time_s))
    first, how, fastest = tried[order[0]]
    chosen = estimated[first].predicted
    also = f" and {len(shared)} of them with micro-batches in proportion" if shared else ""
    why = (
        f"the {counted(len(plans), 'best estimate', 'was')} simulated{also}, and of those this one "
        f"is the fastest (number {first + 1} by estimate, {seconds_text(chosen.time_s)}{how})"
    )
    rows = [Candidate(estimated[tried[i][0]].name + tried[i][1], simulated[i]) for i in order]
    best = with_candidates(fastest, rows[:top])
    rest = [
        replace(row, reason=f"not simulated; by estimate {why_slower(chosen, row.predicted)}")
        for row in estimated[len(plans) : top]
    ]
    return replace(best, candidates=(*best.candidates, *rest)), why


def _is_wanted(sizes: Mapping[str, int], max_stages: int | None, strategy: Strategy) -> bool:
    """True if a strategy has the degrees in `sizes`, if given, and at most `max_stages` stages."""
    degrees = zip(AXES, (strategy.pipeline, strategy.data, strategy.tensor), strict=True)
    if sizes and any(sizes.get(axis, 1) != degree for axis, degree in degrees):
        return False
    return strategy.pipeline <= (max_stages or strategy.pipeline)


def _runs_in_turn(strategy: Strategy, profile: ProgramProfile) -> bool:
    """True if micro-batches run one by one through stages; without stages they are sub-batches,
    where ops may mix samples."""
    return strategy.pipeline > 1 and strategy.num_micro_batches(profile.model.batch) > 1


def _why_joined(
    program: Program, profile: ProgramProfile, cluster: Cluster, wanted: Sequence[Strategy]
) -> str:
    """Explain why micro-batches cannot run one by one through stages; empty if they can, or if no
    strategy needs it."""
    is_mixed = len({node.device for node in cluster.nodes}) > 1
    if not is_mixed and not any(_runs_in_turn(s, profile) for s in wanted):
        return ""
    return why_not_one_by_one(program)


def _tensor_degrees(
    cluster: Cluster, sizes: Mapping[str, int], max_tensor: int | None
) -> list[int]:
    """Tensor degrees that divide every node, or the one that the mesh asks for."""
    whole = math.gcd(*(node.devices for node in cluster.nodes))
    degrees = divisors(whole)
    if sizes:
        degrees = [n for n in degrees if n == sizes.get("tensor", 1)]
        devices = math.prod(sizes.values())
        if devices != cluster.num_devices or not degrees:
            raise PlanError(
                f"mesh {dict(sizes)} does not suit planner 'amp'; give a mesh of all "
                f"{cluster.num_devices} devices of cluster '{cluster.name}', with a tensor degree "
                f"that divides {whole}, or no mesh."
            )
        return degrees
    return [n for n in degrees if n <= (max_tensor or n)]


def _plan(program: Program, placed: Placed, profile: ProgramProfile, links: ClusterArrays) -> Plan:
    strategy = placed.estimate.strategy
    micro_batches = strategy.num_micro_batches(profile.model.batch)
    mesh = Mesh(data=strategy.data, tensor=strategy.tensor)
    # Without replicas there is nothing to divide.
    zero = profile.model.zero if strategy.data > 1 else 0
    plan = replace(plan_megatron(program, mesh), planner="amp", zero=zero)
    in_order = np.arange(placed.grid.size).reshape(placed.grid.shape)
    moved = not np.array_equal(placed.grid, in_order)
    if strategy.pipeline == 1:
        order = f"ranks are best placed on devices {placed.grid.flatten().tolist()}"
        notes = (*plan.notes, order) if moved else plan.notes
        return replace(plan, batch_split=micro_batches, notes=notes)
    stages = tuple(
        tuple(layer for block in profile.blocks[left:right] for layer in block.plan_names)
        for left, right in pairwise(placed.estimate.cuts)
    )
    pipeline = Pipeline(
        stages=stages,
        micro_batches=micro_batches,
        devices=tuple(_types(stage, links) for stage in placed.grid)
        if len(links.names) > 1
        else (),
        ranks=tuple(tuple(map(int, stage.flat)) for stage in placed.grid) if moved else (),
    )
    return replace(plan, mesh={"pipeline": strategy.pipeline, **plan.mesh}, pipeline=pipeline)


def _types(stage: Grid, links: ClusterArrays) -> str:
    return "+".join(dict.fromkeys(links.names[kind] for kind in links.kind[stage].flat))


def _name(strategy: Strategy, profile: ProgramProfile) -> str:
    count = strategy.num_micro_batches(profile.model.batch)
    return (
        f"pipeline={strategy.pipeline},data={strategy.data},tensor={strategy.tensor}, "
        f"{count} x {strategy.micro_batch} samples"
    )


def _predicted(placed: Placed, profile: ProgramProfile, links: ClusterArrays) -> Predicted:
    """Convert an estimate: time by part of the slowest stage, memory by part of the fullest."""
    estimate = placed.estimate
    strategy, model = estimate.strategy, profile.model
    tensor_s = _tensor_s(placed, profile, links)
    memory = stage_bytes(model, strategy, estimate.cuts)
    limits = capacities(links, placed.grid).tolist()
    fullest = max(range(len(memory)), key=lambda stage: sum(memory[stage].values()) / limits[stage])
    parts = {"tensor": tensor_s, "data": estimate.sync_s, "pipeline": estimate.boundary_s}
    communication = {axis: seconds for axis, seconds in parts.items() if seconds}
    return Predicted(
        time_s=estimate.seconds,
        compute_s=estimate.compute_s - tensor_s,
        communication_s=communication,
        exposed_s=sum(communication.values()),
        bubble_s=estimate.bubble_s,
        memory_bytes=memory[fullest],
        capacity_bytes=limits[fullest],
        source="estimated",
    )


def _tensor_s(placed: Placed, profile: ProgramProfile, links: ClusterArrays) -> float:
    """Seconds of the tensor axis in the slowest stage, over all micro-batches."""
    estimate = placed.estimate
    tensor = estimate.strategy.tensor
    best, seconds = 0.0, 0.0
    for stage, (left, right) in zip(placed.grid, pairwise(estimate.cuts), strict=True):
        for kind in np.unique(links.kind[stage]):
            key = (links.names[int(kind)], tensor)
            whole = BACKWARD * float(profile.model.times(*key)[left:right].sum())
            if whole > best:
                best = whole
                seconds = sum(profile.tensor_s[key][left:right]) / whole * estimate.compute_s
    return seconds
