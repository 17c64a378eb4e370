"""Points of the search space that fit only with a chunked loss or with offloading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardweave.planners.auto.estimate import Estimator, PointEstimate
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

    def others(self, point: JointPoint, dimension: str) -> list[JointPoint]:
        """List the point with each allowed value of `SPARING` whose training state fits."""
        points = [point.with_value(**{dimension: value}) for value in SPARING[dimension]]
        allowed = filter(self.space.constraints.allows, points)
        return [p for p in allowed if self.estimator.estimate(p).state_bytes <= self.capacity]

    def lacking(
        self,
        priced: Mapping[JointPoint, PointEstimate | Predicted],
        dimension: str,
        limit_s: float | None,
        *,
        is_bound: bool = False,
    ) -> list[JointPoint]:
        """List the points below `limit_s` that may fit with another value of a dimension, and only
        so: the fastest first or, without a limit, those that then need the least memory. is_bound:
        compare lower bounds, not estimates, with the limit."""
        ranks: dict[JointPoint, float] = {}
        for point, price in priced.items():
            is_estimate = isinstance(price, PointEstimate)
            peak = price.memory_bytes if is_estimate else price.peak_bytes
            time_s = price.bound_s if is_estimate and is_bound else price.time_s
            if peak <= self.capacity or time_s >= (math.inf if limit_s is None else limit_s):
                continue
            least = peak - self.estimator.spared_bytes(point, dimension)
            if least <= self.capacity and self.others(point, dimension):
                ranks[point] = least if limit_s is None else time_s
        return sorted(ranks, key=ranks.__getitem__)
