"""Points of the search space that fit only with a chunked loss or with offloading."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardweave.planners.auto.estimate import MAY_FIT, Estimator, PointEstimate
from shardweave.planners.auto.space.point import JointPoint
from shardweave.planners.auto.space.space import JointSpace
from shardweave.planners.plan.plan_parts import OFFLOAD, Predicted

SPARING = {"loss_chunks": (4, 16), "offload": OFFLOAD[1:]}
"""Dimensions that only save memory, and the values to try, the fastest first."""


@dataclass(frozen=True)
class Sparing:
    """Finds points that need values of `SPARING` to fit into `capacity` bytes."""

    space: JointSpace
    estimator: Estimator
    capacity: float

    def others(
        self, point: JointPoint, dimension: str, limit_s: float, *, is_bound: bool = False
    ) -> Iterator[JointPoint]:
        """Yield the point with each allowed value of `SPARING` with which it may fit and take less
        than `limit_s`; is_bound: by its lower bound, not by its estimate."""
        points = [point.with_value(**{dimension: value}) for value in SPARING[dimension]]
        for other in filter(self.space.constraints.allows, points):
            estimate = self.estimator.estimate(other)
            may_fit = estimate.memory_bytes <= MAY_FIT * self.capacity
            time_s = estimate.bound_s if is_bound else estimate.time_s
            if may_fit and estimate.state_bytes <= self.capacity and time_s < limit_s:
                yield other

    def lacking(
        self,
        priced: Mapping[JointPoint, PointEstimate | Predicted],
        dimension: str,
        limit_s: float,
        *,
        is_bound: bool = False,
    ) -> Iterator[tuple[JointPoint, JointPoint]]:
        """Yield the points below `limit_s` that may fit with another value of a dimension, and only
        so, each with the first of its `others`: the fastest first or, if the limit is infinite,
        those that then need the least memory. is_bound: compare lower bounds, not estimates, with
        the limit."""
        ranks: dict[JointPoint, float] = {}
        for point, price in priced.items():
            is_estimate = isinstance(price, PointEstimate)
            peak = price.memory_bytes if is_estimate else price.peak_bytes
            time_s = price.bound_s if is_estimate and is_bound else price.time_s
            if peak <= self.capacity or time_s >= limit_s:
                continue
            least = peak - self.estimator.spared_bytes(point, dimension)
            if least <= self.capacity:
                ranks[point] = least if math.isinf(limit_s) else time_s
        for point in sorted(ranks, key=ranks.__getitem__):
            first = next(self.others(point, dimension, limit_s, is_bound=is_bound), None)
            if first is not None:
                yield point, first
