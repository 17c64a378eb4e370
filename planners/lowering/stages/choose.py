"""Default stages of plans, devices of their ranks, and numbers of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import gcd

from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import Lookup, read_sharding
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.planners.schedules.uneven import fitted_shares, uneven_table


def with_pipeline(plan: Plan, program: Program, mesh: Mesh) -> Plan:
    """Add balanced stages to a plan that has none, if the mesh has a stage axis.

    They run 1F1B on four micro-batches per stage, or the next smaller number that divides each
    device's rows. Other plans are returned as they are. Raises PlanError if no input has rows, or
    if the plan's number of stages does not fit the mesh.
    """
    ranks = mesh.num_stages
    if plan.pipeline is None and ranks > 1:
        count = micro_batches_for(plan, program, mesh, 4 * ranks)
        stages = balanced_stages(program, ranks)
        note = f"{ranks} stages of about equal work, {count} micro-batches, 1f1b"
        return replace(plan, pipeline=Pipeline(stages, count), notes=(*plan.notes, note))
    if plan.pipeline is not None and plan.pipeline.shares:
        if plan.pipeline.num_places != ranks:
            raise PlanError(
                f"the plan's 'shares' list {plan.pipeline.num_places} ranks in all, but the "
                f"stage axis of mesh {mesh} has {ranks}; make the two numbers equal."
            )
        return plan
    if plan.num_stages % ranks:
        raise PlanError(
            f"the plan has {plan.num_stages} stages, which is not a multiple of the {ranks} "
            f"ranks of the stage axis of mesh {mesh}; change the number of stages, or the mesh."
        )
    if plan.pipeline is not None and mesh.stage_axis is None:
        _check_on_one_device(plan.pipeline, mesh)
    return plan


def _check_on_one_device(pipeline: Pipeline, mesh: Mesh) -> None:
    """Raise PlanError if a mesh without a stage axis cannot run the plan's stages."""
    schedule, count = find_schedule(pipeline.schedule), len(pipeline.stages)
    if count > 1 and schedule.fixed and schedule.chunks != count:
        raise PlanError(
            f"the plan has {count} stages, but the mesh {mesh} has no stage axis, and schedule "
            f"'{schedule.name}' cannot run all stages on one device; add the axis to the mesh, "
            f"as pipeline={count}, or leave 'pipeline' out of the plan."
        )


def devices_of_plan(plan: Plan, mesh: Mesh) -> tuple[int, ...]:
    """Return the device number of each rank of the mesh, from the plan's `ranks`.

    Empty without `ranks`. Devices of one coordinate of the stage axis are in ascending order, as
    DTensor requires. Raises PlanError for `ranks` that do not fit the mesh.
    """
    pipeline = plan.pipeline
    if pipeline is None or not pipeline.ranks:
        return ()
    axis, inner = mesh.stage_axis, mesh.within_stage
    by_place = [sorted(own) for own in _devices_of_places(pipeline, mesh)]
    devices: list[int] = []
    for rank in range(mesh.num_devices):
        at = mesh.coordinates(rank)
        devices.append(by_place[at[axis.name] if axis else 0][inner.rank(at)])
    if len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        raise PlanError(f"the plan's 'ranks' list device {twice} twice; list each device once.")
    return tuple(devices)


def _devices_of_places(pipeline: Pipeline, mesh: Mesh) -> list[list[int]]:
    """Return the devices of each coordinate on the stage axis, from the plan's `ranks`. Raises
    PlanError for a wrong number of devices, or if stages of one coordinate disagree."""
    each = mesh.num_devices // mesh.num_stages
    at_place: dict[int, list[int]] = {}
    for stage, own in enumerate(pipeline.ranks):
        places = _places_of_stage(pipeline, stage, mesh.num_stages)
        if len(own) != len(places) * each:
            raise PlanError(
                f"stage {stage} has {len(own)} ranks, expected {len(places) * each}, the product "
                f"of the other axes of the mesh {mesh}"
                + (f" for each of its {len(places)} coordinates." if len(places) > 1 else ".")
            )
        for index, place in enumerate(places):
            devices = list(own[index * each : (index + 1) * each])
            if at_place.setdefault(place, devices) != devices:
                raise PlanError(
                    f"the plan's 'ranks' put stage {stage} on devices {devices}, but another "
                    f"stage with the same coordinate {place} of the stage axis is on "
                    f"{at_place[place]}; list the same devices for both."
                )
    return [at_place[place] for place in sorted(at_place)]


def _places_of_stage(pipeline: Pipeline, stage: int, num_places: int) -> range:
    """Coordinates on the stage axis at which a stage runs."""
    schedule = find_schedule(pipeline.schedule)
    if not pipeline.shares:
        place = schedule.place(stage, num_places)
        return range(place, place + 1)
    ends = [0, *accumulate(map(len, pipeline.shares))]
    first = schedule.place(stage, len(pipeline.shares))
    return range(ends[first], ends[first + 1])


def micro_batches_for(plan: Plan, program: Program, mesh: Mesh, most: int) -> int:
    """Largest number of micro-batches, up to `most`, that divides each device's rows, and leaves
    each a row for every sub-batch."""
    rows = rows_of(plan, program, mesh)
    rows //= gcd(rows, plan.batch_split)
    return max(count for count in range(1, min(most, rows) + 1) if rows % count == 0)


def fewer_micro_batches(pipeline: Pipeline, most: int, rows: int, ranks: int) -> Pipeline:
    """Reduce a pipeline's micro-batches to the largest number up to `most` that divides `rows` and
    that its schedule can order.

    If there is none, a schedule with the same placement of stages is tried. Raises PlanError.
    """
    for name in (pipeline.schedule, _INSTEAD.get(pipeline.schedule, pipeline.schedule)):
        for count in (n for n in range(most, 0, -1) if rows % n == 0):
            shares = fitted_shares(pipeline.shares, count)
            fewer = replace(pipeline, micro_batches=count, schedule=name, shares=shares)
            if _has_order(fewer, ranks):
                return fewer
    raise PlanError(
        f"schedule '{pipeline.schedule}' cannot order {most} or fewer micro-batches on {ranks} "
        "ranks of the stage axis; give a larger batch, or another schedule."
    )


def _has_order(pipeline: Pipeline, ranks: int) -> bool:
    shares, stages = pipeline.shares, len(pipeline.stages)
    try:
        if shares:
            uneven_table(pipeline.schedule, shares, stages // len(shares))
        else:
            table = find_schedule(pipeline.schedule).table
            table(ranks, pipeline.micro_batches, max(1, stages // ranks))
    except ValueError:
        return False
    return True


_INSTEAD = {"dualpipe-v": "zero-bubble-v"}
"""Schedules that replace those that need many micro-batches; both place stages alike."""


def rows_of(plan: Plan, program: Program, mesh: Mesh) -> int:
    """Greatest common divisor of the inputs' rows on a device. Raises PlanError without rows."""
    table, rows = Lookup(plan.inputs), 0
    for slot in program.arguments:
        shape = shape_of(slot.value)
        if slot.kind != "input" or not shape:
            continue
        text = table.find(slot.name)
        cut = read_sharding(text, slot.name).dims.data[0].data if text else ()
        rows = gcd(rows, max(1, -(-shape[0] // mesh.sizes([axis.data for axis in cut]))))
    if rows:
        return rows
    raise PlanError(
        "no input has a batch dim to split into micro-batches; leave 'pipeline' out of the plan, "
        "or give the model its batch as an input."
    )
