"""What was looked at, by dimension, and what each choice is worth."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from shardweave.planners.auto.search import JointSearch
from shardweave.planners.auto.space.point import DIMENSIONS, JointPoint
from shardweave.planners.cost.quantity import counted, seconds_text
from shardweave.planners.plan.plan_parts import Candidate, Predicted
from shardweave.planners.predict.predict import TIE, gap_parts, why_slower


def looked_at(search: JointSearch) -> Iterator[str]:
    """The values of each dimension, and how many points were estimated, left out and simulated."""
    points = [*search.estimates]
    counts = len(search.evaluator.found)
    reader = search.estimator.reader
    yield (
        f"{counted(len(points), 'point of the joint space', 'was')} estimated from the blocks of "
        f"{counted(reader.num_partitions, 'partition')} and {counts} simulated; "
        + (
            "no other can be faster, by its bound"
            if search.is_exact
            else f"others may be faster: {search.stopped or 'their bounds are lower'}"
        )
    )
    if search.too_large:
        larger = counted(search.too_large, "more point", "needs")
        yield f"{larger} more memory for parameters and optimizer alone"
    seen = list(search.evaluator.found)
    for name in DIMENSIONS:
        values = dict.fromkeys(point.value(name) for point in (*points, *seen))
        if len(values) > 1:
            tried = {point.value(name) for point in seen}
            yield f"{name}: {', '.join(_runs(sorted_values(values), tried))}"


def _runs(values: Sequence[str], tried: Collection[str]) -> Iterator[str]:
    """Values in order; those next to each other that were estimated alone in one pair of
    brackets."""
    for is_tried, group in groupby(values, tried.__contains__):
        if is_tried:
            yield from group
        else:
            yield f"({', '.join(group)})"


def sorted_values(values: dict[str, None]) -> list[str]:
    """A dimension's values: numbers by size, then words."""
    return sorted(
        values, key=lambda value: (not value.isdigit(), int(value) if value.isdigit() else 0)
    )


def over_own(search: JointSearch, best: Candidate) -> Iterator[str]:
    """By how much another planner's plan is faster than the fastest point of the joint space."""
    own = next(((point, found) for point, found in search.seen if found.fits), None)
    if own is None:
        yield f"{best.name} fits, and no point of the joint space that was simulated does"
    else:
        gap = seconds_text(own[1].time_s - best.predicted.time_s)
        reason = why_slower(best.predicted, own[1])
        yield f"{best.name} is worth {gap} against the joint space's own: {own[0]}; {reason}"


def worth(search: JointSearch, point: JointPoint, best: Predicted) -> Iterator[str]:
    """For each dimension that makes a difference to a point: the fastest that was simulated with
    another value, and why it is slower."""
    for name, value in search.space.constraints.fixed.items():
        if not point.chooses(name):
            yield f"{name}={value} was asked for, and makes no difference to this plan"
    for name in filter(point.chooses, DIMENSIONS):
        others = [
            (found, one)
            for one, found in search.seen
            if found.fits and one.value(name) != point.value(name)
        ]
        if not others:
            continue
        found, one = others[0]
        share = found.time_s / best.time_s - 1
        own, other = f"{name}={point.value(name)}", f"{name}={one.value(name)}"
        if abs(share) < TIE:
            yield f"{own} is a tie with {other}: {one} takes {share:+.1%}"
            continue
        gap = f"{seconds_text(found.time_s - best.time_s)} ({share:.1%})"
        yield f"{own} is worth {gap} against {other}: {one}{gap_parts(best, found)}"
