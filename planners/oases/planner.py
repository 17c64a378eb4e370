"""The planner `oases`: a degree of tensor parallelism per block, with overlapped communication.

Li et al., *Automated Tensor Model Parallelism with Overlapped Communication*, arXiv 2305.16121.

In the chain model only the next block's compute hides a message, and gathers are never hidden,
unlike in the schedules that run. So the model's best paths are simulated, and then changes of
single blocks of the fastest, until none is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import check_plan_precision
from shardweave.planners.cost.quantity import counted, gib, seconds_text
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.oases.chain import MEMORY_PARTS, Chain, ChainCosts, linearise, runs
from shardweave.planners.oases.degree import Axes, DegreeSpace, plan_of_degrees
from shardweave.planners.oases.dp import Path, Solution, solve_chain
from shardweave.planners.oases.program import ChainOptions, chain_of_program
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, Pipeline, Predicted
from shardweave.planners.plan.replicated import batch_shardings
from shardweave.planners.predict.predict import predict_plan, with_candidates

REFINED = 16
"""Default number of simulated assignments of degrees: enough to reach a local optimum with few
blocks; with many, the chain model's best ones."""

TOP = 4
"""Number of the chain model's best paths that are simulated before single blocks are changed, in
case another path than the first is the better start. Not tuned."""


def refined(
    costs: ChainCosts,
    first: Path,
    budget_bytes: float,
    simulate: Callable[[Path], Predicted],
    most: int,
) -> dict[Path, Predicted]:
    """Simulate at most `most` paths, and return their predictions, the fastest that fits first.

    first: a path that fits by the chain model; it is always simulated. Then come the `TOP` best
    paths, as far as they fit, then paths that change one block of the fastest so far, in the order
    of the model's time. If `most` suffices, the result is a local optimum: no path that differs
    from it in one block is faster.
    """
    seen: dict[Path, Predicted] = {}
    near = [first, *(p for p in best_paths(costs, TOP) if costs.memory(p) <= budget_bytes)]
    while True:
        before = min(seen, key=lambda path: _rank(seen[path]), default=None)
        for path in dict.fromkeys(near):
            if path not in seen and len(seen) < max(1, most):
                seen[path] = simulate(path)
        order = sorted(seen, key=lambda path: _rank(seen[path]))
        if order[0] == before:
            return {path: seen[path] for path in order}
        near = sorted(_changed(costs, order[0]), key=costs.time_s)


def _rank(predicted: Predicted) -> tuple[bool, float]:
    return not predicted.fits, predicted.time_s


def _changed(costs: ChainCosts, path: Path) -> Iterator[Path]:
    """Yield paths that differ in the choice of one block."""
    for place, row in enumerate(costs.unary_s):
        for choice in range(len(row)):
            if choice != path[place]:
                yield (*path[:place], choice, *path[place + 1 :])


def best_paths(costs: ChainCosts, count: int) -> list[Path]:
    """Return the `count` paths of least summed costs, the least first. Memory is ignored, and so
    are the slowest stage's further micro-batches, so that with stages the paths may not be the
    fastest. Takes time linear in nodes and in `count`, and quadratic in choices."""
    ends = [[(time_s, (choice,))] for choice, time_s in enumerate(costs.unary_s[0])]
    for row, matrix in zip(costs.unary_s[1:], costs.edge_s, strict=True):
        ends = [
            sorted(
                (time_s + matrix[path[-1]][choice] + node_s, (*path, choice))
                for paths in ends
                for time_s, path in paths
            )[:count]
            for choice, node_s in enumerate(row)
        ]
    whole = sorted(p for paths in ends for p in paths)
    return [path for _, path in whole[:count]]


def plan_oases(
    program: Program,
    mesh: Mesh,
    *,
    cluster: Cluster,
    tensor: str = "tensor",
    data: str = "data",
    batch_split: int = 2,
    recompute: str = "after-communication",
    schedule: str = "cross-pass",
    precision: str = "",
    memory_share: float = 0.95,
    micro_batches: int = 0,
    refine: int = REFINED,
) -> Plan:
    """The degrees of least time for a step of two sub-batches, and the whole step as a plan.

    The tensor axis is factored into digits. A block of degree p is sharded over the last digits,
    whose product is p, and its batch over `data` and the other digits.

    Objective: seconds, the paper's (3) + (4) and the reduction of gradients; subject to (6), the
    memory of `memory_share` of the smallest device, in bytes, with the optimizer's state of the
    plan's `precision`. Exact for this model (`oases.dp`). The model prices, at each degree, the
    program that runs if all blocks have it.

    On a mesh with a stage axis (Sec. 5.4) each stage gets about equal work and the memory of its
    own device, and runs 1F1B: (n - 1) times the slowest stage and the sum of all.

    batch_split: 2, or 1 for a blocking step. micro_batches: number in a step; 0: as many as
    divide each device's rows, at most four per stage. A degree below the whole axis needs more
    rows. refine: number of assignments of degrees that are simulated, which the paper does not do:
    the best of the model, and changes of single blocks of the fastest (`refined`); 0 takes the
    model's best.

    Raises ValueError for invalid options and a program without parallel pairs, PlanError if no
    degrees fit into memory.
    """
    _check(batch_split, memory_share)
    check_plan_precision(precision)
    pipeline = _pipeline(program, mesh, data, batch_split, micro_batches)
    axes = Axes.of(mesh, tensor, data, batch_split, pipeline)
    options = ChainOptions(recompute, precision)
    problem = chain_of_program(program, axes, cluster, options)
    devices = cluster.device_types(mesh.num_devices)
    budget = memory_share * min(device.memory_bytes for device in devices)
    solution = solve_chain(problem.chain, budget)
    costs = linearise(problem.chain)
    candidates = tuple(_candidates(problem.chain, costs, solution, budget))
    step = Plan(recompute=recompute, schedule=schedule, precision=precision)
    plan = replace(
        _with_degrees(program, problem.space, solution.degrees, step),
        reasons=tuple(_reasons(problem.chain, solution, candidates)),
        candidates=candidates,
    )
    if not refine:
        return plan
    lowerings = Lowerings(program, most=RECENT)

    def planned(path: Path) -> Plan:
        return _with_degrees(program, problem.space, problem.chain.degrees(path), step)

    def simulated(path: Path) -> Predicted:
        return predict_plan(lowerings, planned(path), cluster)

    seen = refined(costs, solution.path, budget, simulated, refine)
    rows = [Candidate(runs(problem.chain.degrees(path)), took) for path, took in seen.items()]
    first_s = seconds_text(seen[solution.path].time_s)
    count = counted(len(seen), "assignment", "was")
    reason = f"{count} simulated; the chain model's best takes {first_s}"
    best = replace(planned(next(iter(seen))), reasons=(*plan.reasons, reason))
    return with_candidates(best, rows)


def _pipeline(
    program: Program, mesh: Mesh, data: str, batch_split: int, micro_batches: int
) -> Pipeline | None:
    """Make the stages and micro-batches of a step; None for one of each."""
    inputs, _ = batch_shardings(program, mesh, data)
    base = with_pipeline(Plan(inputs=inputs, batch_split=batch_split), program, mesh).pipeline
    if not micro_batches:
        return base
    return replace(base or Pipeline((("*",),)), micro_batches=micro_batches)


def _with_degrees(program: Program, space: DegreeSpace, degrees: Sequence[int], step: Plan) -> Plan:
    """Make the plan of `degrees`. step: plan with the other choices, such as passes."""
    return replace(
        plan_of_degrees(program, space, degrees),
        recompute=step.recompute,
        schedule=step.schedule,
        precision=step.precision,
    )


def _check(batch_split: int, memory_share: float) -> None:
    if batch_split not in (1, 2):
        raise ValueError(
            f"batch_split={batch_split}, expected 2, for two sub-batches whose compute and "
            "communication alternate, or 1, for no split."
        )
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share}; give a fraction above 0, at most 1.")


def _candidates(
    chain: Chain, costs: ChainCosts, solution: Solution, budget: float
) -> Iterator[Candidate]:
    """List the solution, then the paths with one degree for all blocks, by time."""
    yield Candidate(runs(solution.degrees), _predicted(chain, costs, solution.path, budget))
    common = [
        choice.degree
        for choice in chain.blocks[0].choices
        if all(choice.degree in [c.degree for c in block.choices] for block in chain.blocks)
    ]
    paths = [chain.path([degree] * len(chain.blocks)) for degree in common]
    for path in sorted(paths, key=costs.time_s):
        if path == solution.path:
            continue
        predicted = _predicted(chain, costs, path, budget)
        reason = (
            f"{predicted.time_s / solution.time_s - 1:.1%} slower"
            if predicted.fits
            else f"{gib(predicted.peak_bytes)} GiB of {gib(budget)} GiB"
        )
        yield Candidate(runs(chain.degrees(path)), predicted, reason)


def _predicted(chain: Chain, costs: ChainCosts, path: Sequence[int], budget: float) -> Predicted:
    """The chain model's prediction for a path: seconds, and bytes by part."""
    chosen = [block.choices[a] for block, a in zip(chain.blocks, path, strict=True)]
    works = [work for choice in chosen for work in (choice.forward, choice.backward)]
    share = chain.micro_batches / len(chain.starts)
    return Predicted(
        time_s=costs.time_s(path),
        compute_s=share * sum(sum(work.compute_s) for work in works),
        communication_s={
            "blocks": share * sum(sum(work.communication_s) for work in works),
            "gradients": share * sum(choice.sync_s for choice in chosen),
        },
        memory_bytes=dict(zip(MEMORY_PARTS, chain.memory_parts(path), strict=True)),
        capacity_bytes=budget,
        source="estimated",
    )


def _reasons(chain: Chain, solution: Solution, candidates: Sequence[Candidate]) -> Iterator[str]:
    counts = Counter(solution.degrees)
    shown = ", ".join(f"{count} of degree {degree}" for degree, count in sorted(counts.items()))
    yield (
        f"{len(chain.blocks)} blocks, {shown}: {solution.time_s * 1e3:.3f} ms and "
        f"{gib(solution.memory_bytes)} GiB by the chain model"
    )
    for candidate in candidates[1:]:
        yield f"all blocks {candidate.name}: {candidate.reason}"
