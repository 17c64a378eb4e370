"""Choosing the plan that a request is compiled with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardweave.driver.step.request import DEFAULT_PLAN, Request
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.megatron.planner import EXPERT
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_recomputed, check_stages
from shardweave.planners.plan.zero import DATA_AXIS
from shardweave.planners.planning import plan, resolve_plan


def choose_plan(program: Program, request: Request) -> Plan | None:
    """Return the plan to follow; None if there is nothing to shard and no plan is given. For a
    cluster a planner (by default `auto`) makes the plan, and may choose the mesh."""
    given, is_sequential = request.plan, request.sequence_parallel
    if request.cluster is not None:
        planner = given if isinstance(given, str) else ""
        options: dict[str, Any] = {"sequence_parallel": True} if is_sequential else {}
        assert request.mesh is None or isinstance(request.mesh, Mesh)
        chosen = plan(program, request.mesh, planner, cluster=request.cluster, **options)
        return with_pipeline(chosen, program, Mesh(**chosen.mesh))
    if given is None and request.devices.num_devices == 1 and not (is_sequential or request.zero):
        return None
    resolved = resolve_plan(
        DEFAULT_PLAN if given is None else given,
        program,
        request.devices,
        sequence_parallel=is_sequential,
    )
    check_stages(resolved, program, (name for name, _ in request.model.named_modules() if name))
    check_recomputed(resolved, program)
    if request.zero:
        resolved = _in_shards(resolved, request)
    return with_pipeline(resolved, program, request.devices)


def _in_shards(plan: Plan, request: Request) -> Plan:
    """Add the requested ZeRO stage to a plan. Raises ValueError if the plan cannot have it."""
    if request.devices.num_devices > 1 and {DATA_AXIS, EXPERT}.isdisjoint(request.devices.names):
        raise ValueError(
            f"zero={request.zero} shards parameters over the axis '{DATA_AXIS}', which the mesh "
            f"{request.devices} does not have; add the axis to the mesh, or leave zero out."
        )
    if plan.zero not in (0, request.zero):
        raise ValueError(
            f"the plan has zero={plan.zero}, but zero={request.zero} is given; give one of them "
            "only."
        )
    return replace(plan, zero=request.zero)
