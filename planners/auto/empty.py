"""Why a search has nothing to choose from, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from shardweave.planners.auto.search import JointSearch
from shardweave.planners.auto.space.point import MESH, ORDERS
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.auto.worth import sorted_values
from shardweave.planners.cost.quantity import bytes_text, counted


def why_empty(search: JointSearch) -> str:
    """A sentence on a search that simulated nothing: what left it no point, and a way out."""
    space = search.space
    asked = str(space.constraints)
    what = f" with {asked}" if asked else ""
    where = f"{counted(space.devices, 'device')} for a batch of {space.batch}"
    opening = f"the joint space has no plan{what} on {where}"
    problems = search.evaluator.problems
    problem = space.whole or next(iter(problems.values()), "")
    if search.too_large:
        return (
            f"{opening} that fits: {counted(search.too_large, 'point', 'needs')} more memory for "
            f"parameters and optimizer alone, at least {bytes_text(search.least_state_bytes)} of "
            f"{bytes_text(search.capacity)} a device; use more devices or devices with more "
            f"memory, or allow what divides them (zero=3, tensor, stages). {problem}".rstrip()
        )
    if problems:
        points = "its only point" if len(problems) == 1 else f"none of its {len(problems)} points"
        can = "cannot" if len(problems) == 1 else "can"
        return f"{opening}: {points} {can} be partitioned. {problem}"
    ways = "; ".join(_ways_out(search)) or (
        f"no single one of these can be left out to have one, and there are at most "
        f"{counted(space.parts, 'stage')}; leave out more"
        if asked or space.mesh
        else "data parallelism has to divide the batch, and there are at most "
        f"{counted(space.parts, 'stage')}; change the batch or the number of devices"
    )
    return f"{opening}: {'; '.join((*_indivisible(space), ways))}. {problem}".rstrip()


def _indivisible(space: JointSpace) -> Iterator[str]:
    """That the product of the degrees which are asked for does not divide the devices, if so."""
    fixed = space.constraints.fixed
    degrees = [name for name in MESH if name in fixed]
    product = math.prod(int(fixed[name]) for name in degrees)
    if len(degrees) > 1 and space.devices % product:
        yield (
            f"{' x '.join(f'{name}={fixed[name]}' for name in degrees)} is {product}, which does "
            f"not divide {counted(space.devices, 'device')}"
        )


def _ways_out(search: JointSearch) -> Iterator[str]:
    """For each single wish without which there are points: what may stand in its place."""
    space = search.space
    if space.mesh is not None and _has_points(_like(search, has_mesh=False)):
        yield f"without the mesh {space.mesh} there are plans; give other sizes, or none"
    for name in dict.fromkeys((*space.constraints.fixed, *space.constraints.forbidden)):
        values = _values(_like(search, without=name), name)
        if values:
            yield f"{name} can be {' or '.join(values)}"


def _like(search: JointSearch, *, without: str = "", has_mesh: bool = True) -> JointSpace:
    """The space without what a user asks of one dimension, or of the mesh."""
    old = search.space
    reader, mesh = search.estimator.reader, old.mesh if has_mesh else None
    constraints = old.constraints.without(without)
    new = joint_space(reader, mesh, constraints, has_list=old.has_list, runnable=False)
    return replace(new, cuts=replace(new.cuts, devices=old.devices), whole=old.whole)


def _has_points(space: JointSpace) -> bool:
    return any(True for _ in space.all_points())


def _values(space: JointSpace, name: str) -> list[str]:
    points = space.all_points()
    if name in ORDERS:
        points = chain.from_iterable(map(space.variants, points))
    return sorted_values(dict.fromkeys(point.value(name) for point in points))
