"""Report of a search: points seen, the gain from each choice, reasons for an empty result."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

from shardweave.planners.auto.search import JointSearch
from shardweave.planners.auto.space.point import DIMENSIONS, MESH, ORDERS, JointPoint
from shardweave.planners.auto.space.space import JointSpace, joint_space
from shardweave.planners.cost.quantity import bytes_text, counted, seconds_text
from shardweave.planners.plan.plan_parts import Candidate, Predicted
from shardweave.planners.predict.predict import TIE, gap_parts, why_slower


def looked_at(search: JointSearch) -> Iterator[str]:
    """Yield sentences on how many points were estimated, and which values of each dimension."""
    points = [*search.estimates]
    counts = len(search.evaluator.simulated)
    reader = search.estimator.reader
    yield (
        f"{counted(len(points), 'point of the joint space', 'was')} estimated from the blocks of "
        f"{counted(reader.num_partitions, 'partition')} and {counts} simulated; "
        + (
            "no other can be faster, by its lower bound"
            if search.is_exact
            else f"others may be faster: {search.stopped or 'their bounds are lower'}"
        )
    )
    if search.too_large:
        larger = counted(search.too_large, "more point", "needs")
        yield f"{larger} more memory for parameters and optimizer alone"
    seen = list(search.evaluator.simulated)
    for name in DIMENSIONS:
        values = dict.fromkeys(point.value(name) for point in (*points, *seen))
        if len(values) > 1:
            tried = {point.value(name) for point in seen}
            yield f"{name}: {', '.join(_runs(sorted_values(values), tried))}"


def _runs(values: Sequence[str], tried: Collection[str]) -> Iterator[str]:
    """Yield values in order; adjacent ones that were only estimated share a pair of brackets."""
    for is_tried, group in groupby(values, tried.__contains__):
        if is_tried:
            yield from group
        else:
            yield f"({', '.join(group)})"


def sorted_values(values: dict[str, None]) -> list[str]:
    """Sort a dimension's values: numbers by size, then words."""
    return sorted(
        values, key=lambda value: (not value.isdigit(), int(value) if value.isdigit() else 0)
    )


def over_own(search: JointSearch, best: Candidate) -> Iterator[str]:
    """Yield how much faster another planner's plan is than the fastest point of `auto`, and why."""
    own = next(((point, p) for point, p in search.seen if p.fits), None)
    if own is None:
        yield f"{best.name} fits, and no point of the joint space that was simulated does"
    else:
        gap = seconds_text(own[1].time_s - best.predicted.time_s)
        reason = why_slower(best.predicted, own[1])
        yield f"{best.name} is worth {gap} against the joint space's own: {own[0]}; {reason}"


def worth(search: JointSearch, point: JointPoint, best: Predicted) -> Iterator[str]:
    """Yield, for each dimension that matters to a point, the fastest simulated point with another
    value and why it is slower."""
    for name, value in search.space.constraints.fixed.items():
        if not point.chooses(name):
            yield f"{name}={value} was asked for, but makes no difference to this plan"
    for name in filter(point.chooses, DIMENSIONS):
        others = [(p, q) for q, p in search.seen if p.fits and q.value(name) != point.value(name)]
        if not others:
            continue
        predicted, nearest = others[0]
        share = predicted.time_s / best.time_s - 1
        own, other = f"{name}={point.value(name)}", f"{name}={nearest.value(name)}"
        if abs(share) < TIE:
            yield f"{own} is a tie with {other}: {nearest} takes {share:+.1%}"
            continue
        gap = f"{seconds_text(predicted.time_s - best.time_s)} ({share:.1%})"
        yield f"{own} is worth {gap} against {other}: {nearest}{gap_parts(best, predicted)}"


def why_empty(search: JointSearch) -> str:
    """Write the error for a search that simulated nothing: the cause, and what to change."""
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
    """Yield a message if the product of the fixed degrees does not divide the devices."""
    fixed = space.constraints.fixed
    degrees = [name for name in MESH if name in fixed]
    product = math.prod(int(fixed[name]) for name in degrees)
    if len(degrees) > 1 and space.devices % product:
        yield (
            f"{' x '.join(f'{name}={fixed[name]}' for name in degrees)} is {product}, which does "
            f"not divide {counted(space.devices, 'device')}"
        )


def _ways_out(search: JointSearch) -> Iterator[str]:
    """Yield, for each single constraint whose removal gives points, the values allowed instead."""
    space = search.space
    if space.mesh is not None and _has_points(_like(search, has_mesh=False)):
        yield f"without the mesh {space.mesh} there are plans; give other sizes, or none"
    for name in dict.fromkeys((*space.constraints.fixed, *space.constraints.forbidden)):
        values = _values(_like(search, without=name), name)
        if values:
            yield f"{name} can be {' or '.join(values)}"


def _like(search: JointSearch, *, without: str = "", has_mesh: bool = True) -> JointSpace:
    """Copy the search space without the constraints on one dimension, or without the mesh."""
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
