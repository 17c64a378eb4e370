"""Measured curves, interpolated on log axes."""

from __future__ import annotations

import math
from bisect import bisect_left

from shardweave.planners.cost.cluster import Points


def interpolate(points: Points, x: float) -> float:
    """The y at x > 0; beyond the ends the y of the end."""
    index = bisect_left(points, (x,))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    if y0 <= 0 or y1 <= 0:
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))


def time_at(points: Points, work: float) -> float:
    """Seconds for an amount of work: a curve that beyond its end grows with the work."""
    last, seconds = points[-1]
    if work > last:
        return seconds * work / last
    return interpolate(points, work)
