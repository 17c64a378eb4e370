"""Oases: a degree of tensor parallelism for each block, with overlapped communication.

Li et al., *Automated Tensor Model Parallelism with Overlapped Communication*, arXiv 2305.16121.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from xdsl.ir import SSAValue

from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import Sharding
from shardweave.ir.program import Program
from shardweave.ir.types import shape_of
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import ADAM_STATE
from shardweave.planners.cost.quantity import gib
from shardweave.planners.oases.chain import MEMORY_PARTS, Chain, linearise, runs
from shardweave.planners.oases.degree import TIME_AXIS, Axes
from shardweave.planners.oases.dp import Solution, solve_chain
from shardweave.planners.oases.ilp import solve_chain_ilp
from shardweave.planners.oases.program import ChainOptions, ProgramChain, chain_of_program
from shardweave.planners.op_names import named_ops
from shardweave.planners.plan import Plan
from shardweave.planners.plan_parts import Candidate, Predicted
from shardweave.planners.replicated import batch_shardings

SOLVERS = ("dp", "highs", "cbc")


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
    solver: str = "dp",
    max_switches: int | None = None,
    literal: bool = False,
    optimizer_multiplier: float = ADAM_STATE,
    memory_share: float = 0.95,
) -> Plan:
    """The degrees of least time for a step of two sub-batches, and the whole step as a plan.

    The tensor axis is factored into digits. A block of degree p is cut over the last digits,
    which multiply to p, and its batch over `data` and the other digits.

    Objective: seconds, the paper's (3) + (4) and the reduction of gradients; subject to (6), the
    memory of `memory_share` of the smallest device, in bytes, with `optimizer_multiplier` bytes of
    optimizer state per byte of parameters. Exact for this model (`oases_dp`, or an ILP by
    `solver` highs or cbc). max_switches: how often the degree may change. literal: the objective
    of the released planner, which knows no reduction of gradients and recomputes all. The model
    takes the program's ops one by one from the cluster's cost model, at each degree.

    batch_split: 2, or 1 for a blocking step. Raises ValueError for options that are no such, a
    program without parallel pairs, and (ChainError) if no degrees fit into memory.
    """
    _check(batch_split, solver, memory_share)
    axes = Axes.of(mesh, tensor, data, batch_split)
    options = ChainOptions(recompute, optimizer_multiplier, literal)
    found = chain_of_program(program, axes, cluster, options)
    devices = cluster.device_types(mesh.num_devices)
    budget = memory_share * min(device.memory_bytes for device in devices)
    solution = _solve(found.chain, budget, solver, max_switches, literal)
    candidates = tuple(_candidates(found.chain, solution, budget, literal))
    return replace(
        plan_of_degrees(program, mesh, found, solution.degrees),
        recompute=recompute,
        schedule=schedule,
        reasons=tuple(_reasons(found.chain, solution, candidates)),
        candidates=candidates,
    )


def plan_of_degrees(
    program: Program, mesh: Mesh, found: ProgramChain, degrees: Sequence[int]
) -> Plan:
    """The shardings by which each block has a degree of its own.

    The plan's mesh has the tensor axis in digits, unless all blocks are cut over all of it.
    """
    axes = found.axes
    whole = set(degrees) == {max(axes.degrees)}
    used = mesh if whole else axes.mesh
    inputs, notes = batch_shardings(program, mesh, axes.data)
    return Plan(
        mesh={axis.name: axis.size for axis in used.axes},
        parameters=_parameters(program, found, degrees, axes.tensor if whole else ""),
        inputs=inputs,
        activations={} if whole else _activations(program, found, degrees),
        planner="oases",
        notes=(*notes, f"degrees of {len(found.blocks)} blocks: {runs(degrees)}"),
        batch_split=axes.batch_split,
    )


def _check(batch_split: int, solver: str, memory_share: float) -> None:
    if batch_split not in (1, 2):
        raise ValueError(
            f"batch_split={batch_split}, but the model is of two sub-batches that alternate; use "
            "2, or 1 for a blocking step."
        )
    if solver not in SOLVERS:
        raise ValueError(f"solver '{solver}' is unknown; use one of {', '.join(SOLVERS)}.")
    if not 0 < memory_share <= 1:
        raise ValueError(f"memory_share={memory_share}; give the share that may be used, 0 .. 1.")


def _solve(
    chain: Chain, budget: float, solver: str, max_switches: int | None, literal: bool
) -> Solution:
    if solver == "dp":
        return solve_chain(chain, budget, max_switches=max_switches, literal=literal)
    name: Literal["highs", "cbc"] = "highs" if solver == "highs" else "cbc"
    return solve_chain_ilp(chain, budget, solver=name, max_switches=max_switches, literal=literal)


def _parameters(
    program: Program, found: ProgramChain, degrees: Sequence[int], whole: str
) -> dict[str, str]:
    """Shardings of the parameters over the digits, or over the axis `whole`."""
    names = {slot.value: slot.name for slot in program.arguments}
    parameters: dict[str, str] = {}
    for degree, cuts in zip(degrees, found.cuts, strict=True):
        for value, cut in cuts[degree].items():
            one = tuple(tuple(replace(p, axis=whole) for p in dim) for dim in cut)
            sharding = Sharding(one if whole else found.axes.digits_cut(cut))
            parameters.setdefault(names[value], _text(sharding, value))
    return parameters


def _activations(program: Program, found: ProgramChain, degrees: Sequence[int]) -> dict[str, str]:
    """Shardings of what blocks hand on, in both passes, by the batch of the one that takes it."""
    names: dict[SSAValue, str] = {op.results[0]: name for name, op in named_ops(program).items()}
    activations: dict[str, str] = {}
    for degree, block in zip(degrees, found.blocks, strict=True):
        shardings = found.times[degree].shardings
        values: list[SSAValue | None] = [*block.enters, block.gradient]
        for value in values:
            # A gradient that an op with other results gives (of a norm) has no name.
            if value is not None and value in names:
                activations[names[value]] = _text(shardings[value].whole(), value)
    return activations


def _text(sharding: Sharding, value: SSAValue) -> str:
    """A sharding as plans write it, without the sub-batches, which `split-batch` adds."""
    dims = tuple(tuple(p for p in dim if p.axis != TIME_AXIS) for dim in sharding.dims)
    attribute = str(ShardingAttr.of(Sharding(dims), shape_of(value)))
    return attribute.removeprefix("#dist.sharding<").removesuffix(">")


def _candidates(
    chain: Chain, solution: Solution, budget: float, literal: bool
) -> Iterator[Candidate]:
    """The solution, then all blocks at one degree each, by time."""
    costs = linearise(chain, literal=literal)
    yield Candidate(runs(solution.degrees), _predicted(chain, solution.path, budget, literal))
    common = [
        one.degree
        for one in chain.blocks[0].choices
        if all(one.degree in [c.degree for c in block.choices] for block in chain.blocks)
    ]
    paths = [chain.path([degree] * len(chain.blocks)) for degree in common]
    for path in sorted(paths, key=costs.time_s):
        if path == solution.path:
            continue
        predicted = _predicted(chain, path, budget, literal)
        needed = sum(predicted.memory_bytes.values())
        reason = (
            f"{gib(needed)} GiB of {gib(budget)} GiB"
            if needed > budget
            else f"{predicted.time_s / solution.time_s - 1:.1%} slower"
        )
        yield Candidate(runs(chain.degrees(path)), predicted, reason)


def _predicted(chain: Chain, path: Sequence[int], budget: float, literal: bool) -> Predicted:
    """What the chain says of a path: seconds, and bytes by part."""
    chosen = [block.choices[a] for block, a in zip(chain.blocks, path, strict=True)]
    works = [work for choice in chosen for work in (choice.forward, choice.backward)]
    return Predicted(
        time_s=linearise(chain, literal=literal).time_s(path),
        compute_s=sum(sum(work.compute_s) for work in works),
        communication_s={
            "blocks": sum(sum(work.communication_s) for work in works),
            "gradients": sum(choice.sync_s for choice in chosen),
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
    for one in candidates[1:]:
        yield f"all blocks {one.name}: {one.reason}"
