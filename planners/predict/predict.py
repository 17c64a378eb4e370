"""Simulated predictions of plans, and comparisons between plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program, require_program
from shardweave.ir.program.staged import is_staged
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import gib, seconds_text
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.plan.plan_parts import Candidate, Pipeline, PlanError, Predicted
from shardweave.planners.predict.pipeline.runs import simulate_runs
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation
from shardweave.planners.simulate.simulate import simulate
from shardweave.planners.simulate.simulation import Simulation
from shardweave.planners.simulate.update_cost import update_of

_ROUNDING = 1e-9
"""Relative difference up to which times count as equal: sums in another order may differ."""

TIE = 0.01
"""Relative difference up to which two simulated plans are a tie: extrapolating a deep model from a
few blocks may be off by as much."""

_TOLD = 0.05
"""Share of the gap between two plans from which on a part of the step is named as a cause."""


def predicted_of(simulation: Simulation | PipelineSimulation) -> Predicted:
    """Convert a simulation to a plan's prediction: for a pipeline, time of the busiest stage and
    memory of the fullest."""
    if isinstance(simulation, PipelineSimulation):
        busiest, bubble_s, host_s = simulation.busiest, simulation.bubble_s, 0.0
        communication_s = dict(busiest.communication_s)
        memory_bytes = dict(simulation.fullest.memory_parts)
    else:
        busiest, bubble_s, host_s = simulation, 0.0, simulation.host_s
        communication_s = {",".join(axes): t for axes, t in busiest.communication_s.items()}
        memory_bytes = {part: size for part, size in busiest.memory.parts.items() if size}
    return Predicted(
        time_s=simulation.step_s,
        compute_s=busiest.compute_s + busiest.slowdown_s + host_s,
        communication_s=communication_s,
        exposed_s=busiest.exposed_communication_s,
        bubble_s=bubble_s,
        update_s=simulation.update_s,
        memory_bytes=memory_bytes,
        capacity_bytes=simulation.memory_bytes,
        source="simulated",
    )


def simulation_of(
    program: Program | Lowerings,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer_multiplier: float | None = None,
    update: str = "",
) -> Simulation | PipelineSimulation:
    """Partition a global program by a plan, and simulate a step of it on a cluster.

    The lowered program is simulated op by op on one rank or, with stages or micro-batches, run by
    run. A plan with a stage axis but no stages gets balanced ones, as when it runs.
    optimizer_multiplier: bytes of optimizer state per byte of parameters; None: those of Adam in
    the plan's precision. update: as for `simulate_step`. Raises ValueError (PlanError, PassError,
    ClusterError) if the program cannot be partitioned or placed.
    """
    lowerings = Lowerings.of(program)
    plan = with_pipeline(plan, lowerings.program, Mesh(**plan.mesh))
    return simulate_step(
        lowerings.local(plan),
        cluster,
        optimizer_multiplier=optimizer_multiplier,
        precision=plan.precision,
        pipeline=plan.pipeline,
        update=update or plan.update,
    )


def simulate_step(
    program: Program,
    cluster: Cluster | str | Path,
    mesh: Mesh | None = None,
    *,
    plan: Plan | str | Path | None = None,
    optimizer_multiplier: float | None = None,
    precision: str = "",
    pipeline: Pipeline | None = None,
    update: str = "",
) -> Simulation | PipelineSimulation:
    """Simulate one step of a program on a cluster: the program as it is, or under a plan.

    Without a plan the program must be local, staged (simulated run by run, on the cluster's devices
    in order), or for one device.

    Args:
        cluster: A Cluster, a preset's name or a YAML file.
        mesh: Of a local program; by default its own.
        plan: A plan, or a plan's file, for a captured program. A plan without stages whose mesh has
            a stage axis gets balanced stages, as when it runs.
        optimizer_multiplier: Bytes of optimizer state per byte of parameters (2 for Adam); None:
            those of Adam in the precision.
        precision: As in a plan, "fp32", "bf16-mixed" or "fp16-mixed"; with a plan, the plan's.
        pipeline: Of the plan that a staged program was cut by, for the name of its schedule.
        update: A class of torch.optim by name, whose update is simulated too, and whose state is
            counted in place of `optimizer_multiplier`; with a plan, in place of the plan's.

    Raises ValueError for a plan that does not fit the program, and for a mesh other than a staged
    program's own.
    """
    require_program(program)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        check_plan(plan, program)
        goal = find_cluster(cluster)
        return simulation_of(
            program, plan, goal, optimizer_multiplier=optimizer_multiplier, update=update
        )
    if not is_staged(program):
        update = update_of(program, update)
        simulation = simulate(
            program, cluster, mesh, optimizer_multiplier=optimizer_multiplier, precision=precision
        )
        return _with_update(simulation, program, update, precision) if update else simulation
    if mesh is not None and mesh.on_parts_of(program.needed_mesh()) != program.mesh:
        raise ValueError(
            f"the program is for mesh {program.mesh}, but mesh {mesh} is given; leave the mesh out."
        )
    return simulate_runs(
        program,
        find_cluster(cluster),
        pipeline,
        optimizer_multiplier=optimizer_multiplier,
        precision=precision,
        update=update,
    )


def _with_update(
    simulation: Simulation, program: Program, update: str, precision: str
) -> Simulation:
    from shardweave.planners.simulate.update import simulate_update  # traces, which loads slowly

    model = CostModel(simulation.cluster, simulation.mesh)
    cost = simulate_update([program], update, model, precision)
    memory = peak_memory(
        program,
        optimizer_multiplier=cost.state_bytes / max(1, simulation.memory.parts["parameters"]),
        update_bytes=cost.temporary_bytes,
    )
    return replace(simulation, update=cost, memory=memory)


def predict_plan(program: Program | Lowerings, plan: Plan, cluster: Cluster) -> Predicted:
    """Predict a step under a plan by the simulator. Raises as `simulation_of` does."""
    return predicted_of(simulation_of(program, plan, cluster))


def with_candidates(plan: Plan, candidates: Sequence[Candidate]) -> Plan:
    """Add to a plan its candidates, best first, and the reason why each other one lost."""
    best = candidates[0]
    rest = [replace(c, reason=why_slower(best.predicted, c.predicted)) for c in candidates[1:]]
    reasons = [
        *plan.reasons,
        f"{best.name}: {best.predicted.source} {seconds_text(best.predicted.time_s)}",
    ]
    if rest:
        reasons.append(f"next best is {rest[0].name}: {rest[0].reason}")
    return replace(
        plan,
        predicted=best.predicted,
        reasons=tuple(reasons),
        candidates=(replace(best, reason="chosen"), *rest),
    )


def why_slower(best: Predicted, other: Predicted) -> str:
    """Tell in words why a step is worse than `best`: memory that it lacks, or slower parts."""
    if other.capacity_bytes and not other.fits:
        return f"does not fit, by {gib(other.peak_bytes - other.capacity_bytes)} GiB"
    gap = other.time_s - best.time_s
    if abs(gap) <= _ROUNDING * best.time_s:
        return "takes as long"
    if abs(gap) <= TIE * best.time_s:
        return f"a tie, {seconds_text(gap)} slower"
    return f"{seconds_text(gap)} slower{gap_parts(best, other)}"


def gap_parts(best: Predicted, other: Predicted) -> str:
    """Name, in brackets, the parts of `other` that differ most from `best`: the two largest
    increases and the largest decrease."""
    gap = other.time_s - best.time_s
    before, after = time_parts(best), time_parts(other)
    changes = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in before | after}
    largest = sorted(changes.items(), key=lambda item: -item[1])
    least = _TOLD * abs(gap)
    told = [f"{part} +{seconds_text(more)}" for part, more in largest[:2] if more > least]
    told += [f"{part} -{seconds_text(-more)}" for part, more in largest[-1:] if -more > least]
    return f" ({', '.join(told)})" if told else ""


def check_some_fit(
    candidates: Sequence[Candidate],
    cluster: Cluster,
    problem: str = "",
    further: str = "or pipeline stages (planner 'auto')",
) -> None:
    """Raise PlanError if no candidate fits, with the smallest shortfall in GiB.

    problem: reason, if there is no candidate at all. further: advice besides more or larger devices
    and a smaller batch.
    """
    if any(c.predicted.fits for c in candidates):
        return
    if not candidates:
        raise PlanError(
            "no plan of the search space can be partitioned for this program; change the batch "
            f"or the mesh. {problem}"
        )
    nearest = min(candidates, key=lambda c: c.predicted.peak_bytes - c.predicted.capacity_bytes)
    p = nearest.predicted
    parts = ", ".join(f"{part} {gib(size)}" for part, size in p.memory_bytes.items())
    raise PlanError(
        f"no plan fits into the memory of cluster '{cluster.name}'; nearest is {nearest.name}: it "
        f"needs {gib(p.peak_bytes)} GiB ({parts}) of {gib(p.capacity_bytes)} "
        f"GiB, {gib(p.peak_bytes - p.capacity_bytes)} GiB too many; use more "
        f"devices, devices with more memory, a smaller batch, {further}."
    )


def time_parts(predicted: Predicted) -> dict[str, float]:
    """Split a step's seconds by name: compute, exposed communication by axes, bubble, update.
    Exposed communication is attributed to axes in proportion to their communication."""
    total = sum(predicted.communication_s.values())
    share = predicted.exposed_s / total if total else 0.0
    parts = {"compute": predicted.compute_s}
    parts |= {axes: share * seconds for axes, seconds in predicted.communication_s.items()}
    rest = {"bubble": predicted.bubble_s, "update": predicted.update_s}
    return parts | {name: seconds for name, seconds in rest.items() if seconds}
