"""The search: bound every point and simulate the most promising ones.

1. Every point without a context axis (which shards sequences) is estimated from its blocks
(`estimate`), with a lower bound. For a deep model, points that need a partition of their own
wait until a similar point with a partition is known to be fast (`_waits`).
2. For each value of each dimension, the point with the best estimate is simulated. Fast points with
stages that do not fit are also simulated under an order that needs less memory.
3. From the fastest point so far, its neighbours (all points that differ in one dimension or in
schedules) are simulated until none is faster; then those of the next fastest.
4. Points with a context axis are estimated, for the tensor degree of the fastest point and for
degree 1; the best point of each size of that axis is simulated, and 3 is repeated.
5. For the fastest points that recompute, bisection finds the fewest layers per stage that fit.
6. The other points are simulated in order of their estimates, until their bounds exceed the fastest
time; then 5 is repeated.

Before 5, and if nothing fits after 2, the fastest points that lack memory are simulated with a
chunked loss and with offloading, and sequence-parallel points with decomposed products.

The search can stop at any time with the best plan so far. If step 6 ends by itself, that plan is
the fastest of the space, as far as the bounds hold, except for the number of layers in step 5,
`SPARING` and `decompose`, and orders of a single micro-batch, which 1f1b represents.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from shardweave.planners.auto.estimate import FITS_SURELY, MAY_FIT, Estimator, PointEstimate
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.reader import REPEATING
from shardweave.planners.auto.space.point import DIMENSIONS, ORDERS, JointPoint, plainness
from shardweave.planners.auto.space.space import JointSpace
from shardweave.planners.auto.sparing import SPARING, Sparing
from shardweave.planners.cost.quantity import counted, seconds_text
from shardweave.planners.plan.plan_parts import Predicted

STARTS = 3
"""Number of fastest points whose neighbours are simulated, since one may be a local optimum."""

LIKELY_FITS, UNSURE = 1.25, 1.15
"""Estimated memory, as a multiple of the capacity, above which a small model's point ranks last,
and factor on the time of points between 1 and this multiple: the fastest plans of a GPT of one
layer in little memory had estimates of 1.2 times the capacity."""

NEAR = 1.3
"""Points up to this factor slower than the fastest, or larger than the memory, are simulated under
other schedules too: for a small GPT in tight memory such a plan was the best."""

FAR = 1.2
"""Values of a dimension whose best estimate exceeds the overall best by this factor are not
simulated in step 2, which leaves more simulations to the neighbours of the fastest."""

TRUSTED = 1.1
"""Factor for deep models, whose estimates exceed steps by at most about 10% since their ops are
large: points with estimates above the best by more wait until all others were simulated."""

COLLECT_EACH, COLLECT_EACH_DEEP = 16, 64
"""Simulations between two garbage collections. Python's own would run while programs are built and
alive, and take a third of a small model's simulation; without any, programs, which have cycles,
would never be freed. A deep model's programs of few blocks are small."""

FILLED_LATE = ("1f1b", "gpipe")
"""Orders of micro-batches whose pipelines fill and drain with whole passes."""

FILLING = "zero-bubble"
"""The order that fills bubbles, tried at once where there are bubbles: estimates assume 1f1b."""

BALANCED = "zero-bubble-v"
"""The order that places the first and the last stage on one device, which balances memory: fast
points with stages that do not fit are also simulated under it at once."""

PATIENCE = 4
"""Factor on the simulations while no plan fits: 2 of 1,729 plans of a U-Net fitted."""

LATE = 8
"""A simulation that finds a faster plan allows a further eighth of the simulations after it."""

_Estimates = dict[JointPoint, PointEstimate]
_Ranks = dict[JointPoint, tuple[object, ...]]


class OutOfTime(Exception):
    """Raised when the time limit or the limit of simulations is reached."""


@dataclass(eq=False)
class JointSearch:
    """A search and the points that it has priced so far.

    estimates: of all points that can be partitioned and whose training state fits. stopped: reason
    for ending early, or empty. refused: number of points that cannot be sharded. too_large: number
    of points whose training state alone does not fit; over: without optimizer states, it does.
    least_state_bytes: smallest training state.
    """

    space: JointSpace
    estimator: Estimator
    evaluator: Evaluator
    capacity: float
    simulate: int
    deadline_s: float
    tell: Callable[[str], None] | None = None
    estimates: _Estimates = field(default_factory=_Estimates)
    stopped: str = ""
    refused: int = 0
    too_large: int = 0
    over: _Estimates = field(default_factory=_Estimates)
    least_state_bytes: float = float("inf")
    _waiting: list[JointPoint] = field(default_factory=list[JointPoint])
    _least_s: float = math.inf
    _ranks: _Ranks = field(default_factory=_Ranks)
    _best: tuple[int, tuple[JointPoint, Predicted] | None] = (0, None)

    def run(self) -> None:
        """Search until no point is left, time is up, or the user interrupts. If nothing was
        simulated by then, the best estimate is simulated."""
        try:
            self._look()
        except KeyboardInterrupt:
            if not self.estimates:
                raise
            self.stopped = "it was interrupted"
            self._see_one()

    def _look(self) -> None:
        try:
            self._estimate_all(self.space.points())
            self._see_each_value(self.estimates)
            self._estimate_waiting()
            self._refine()
            self._cut_sequences()
            self._refine()
            self._spare_memory()
            self._decompose()
            self._recompute_less()
            self._see_rest()
        except OutOfTime as reason:
            self.stopped = str(reason)
            self._see_one()
        self._spare_memory()
        self._decompose()
        self._recompute_less()

    @property
    def seen(self) -> list[tuple[JointPoint, Predicted]]:
        """Simulated points with predictions: first those that fit, then by time, then simpler."""
        return sorted(
            self.evaluator.simulated.items(),
            key=lambda item: (not item[1].fits, item[1].time_s, plainness(item[0])),
        )

    @property
    def best(self) -> tuple[JointPoint, Predicted] | None:
        """The fastest simulated point that fits, with its prediction; None if none fits. Cached
        until another point is simulated."""
        count = len(self.evaluator.simulated)
        if self._best[0] != count:
            fitting = [item for item in self.evaluator.simulated.items() if item[1].fits]
            best = min(fitting, key=lambda i: (i[1].time_s, plainness(i[0])), default=None)
            self._best = count, best
        return self._best[1]

    @property
    def allowed(self) -> int:
        """Number of simulations allowed: more while nothing fits, and while the last ones find
        something faster."""
        if self.best is None:
            return PATIENCE * self.simulate
        number = 1 + list(self.evaluator.simulated).index(self.best[0])
        return max(self.simulate, number + self.simulate // LATE)

    @property
    def is_exact(self) -> bool:
        """True if the lower bound of each point that was not simulated exceeds the best time, also
        of points that would fit only with values of `SPARING`."""
        if self.stopped or next(self._left(), None) is not None:
            return False
        return not any(self._lacking(dimension, 1, is_bound=True) for dimension in SPARING)

    def _estimate_all(self, points: Iterable[JointPoint], *, may_wait: bool = True) -> None:
        for number, point in enumerate(points):
            if self.estimates:  # of something there has to be the best so far
                self._check_time()
            if number % 256 == 0:
                self.say(f"{counted(len(self.estimates), 'point')} estimated")
            if may_wait and self._waits(point):
                self._waiting.append(point)
                continue
            try:
                estimate = self.estimator.estimate(point)
            except ValueError as error:
                self.refused += 1
                self.evaluator.problems[point] = str(error)
                continue
            self.least_state_bytes = min(self.least_state_bytes, estimate.state_bytes)
            if estimate.state_bytes > self.capacity:
                self.too_large += 1
                if estimate.state_bytes - self.estimator.host_bytes(point) <= self.capacity:
                    self.over[point] = estimate
                continue
            self.estimates[point] = estimate
            if estimate.memory_bytes <= self.capacity:
                self._least_s = min(self._least_s, estimate.time_s)

    def _waits(self, point: JointPoint) -> bool:
        """True to postpone a deep model's point because its twin's estimate is too slow. The twin
        is a similar point that sends as much, computes no more, and needs no own partition."""
        limit_s = self.best[1].time_s if self.best else self._least_s
        if not self.evaluator.depths.is_deep or math.isinf(limit_s):
            return False
        twin = point
        if point.recompute not in ("none", *REPEATING):
            twin = twin.with_value(recompute="none", recompute_layers=0)
            limit_s *= TRUSTED if self.best else FAR
        if self.space.could_cut_sequence(point):
            twin = twin.with_value(sequence_parallel=True)
        if twin is point:
            return False
        try:
            estimate = self.estimates.get(twin) or self.estimator.estimate(twin)
        except ValueError:  # the twin's shardings cannot be, which says nothing of the point's
            return False
        return estimate.time_s > limit_s

    def _estimate_waiting(self, *, may_wait: bool = True) -> None:
        waiting, self._waiting = self._waiting, []
        self._estimate_all(waiting, may_wait=may_wait)

    def _cut_sequences(self) -> None:
        """Estimate points with a context axis, and simulate the best one of each of its sizes."""
        degrees = (1, self.best[0].tensor) if self.best else self.space.cuts.tensor
        known = set(self.estimates)
        for tensor in dict.fromkeys(degrees):
            self._estimate_all(self.space.sequence_points(tensor))
        self._see_each_value([point for point in self.estimates if point not in known])

    def _see_each_value(self, points: Iterable[JointPoint]) -> None:
        """Simulate the best estimate overall, then the best of each value of each dimension, in at
        most half of the simulations: the other half is for the neighbours of the fastest."""
        order = self._by_estimate(points)
        firsts: dict[JointPoint, None] = dict.fromkeys(order[:1])
        for dimension in DIMENSIONS:
            values: dict[str, JointPoint] = {}
            for point in order:
                values.setdefault(point.value(dimension), point)
            firsts.update(dict.fromkeys(values.values()))
        least_s = min((self.estimates[point].time_s for point in order[:1]), default=0.0)
        far = TRUSTED if self.evaluator.depths.is_deep else FAR
        for point in self._by_estimate(firsts)[: max(1, self.simulate // 2)]:
            if self.estimates[point].time_s <= far * least_s and self._may_win(point):
                self._simulate(point)
        if self.best is None:
            self._spare_memory()
        if self.best is None:
            # Nothing fits so far: simulate by estimated memory, the least first.
            rest = sorted(order, key=lambda p: self.estimates[p].memory_bytes)
            for point in rest:
                self._simulate(point)
                if self.best is not None:
                    break

    def _see_one(self) -> None:
        """Simulate the point with the best estimate, if nothing has been simulated."""
        for point in self._by_estimate(self.estimates)[:STARTS]:
            if self.evaluator.simulated:
                return
            self.evaluator.predict(point)

    def _refine(self) -> None:
        """Simulate the neighbours of the fastest points, until none of them is faster."""
        done: set[JointPoint] = set()
        while True:
            starts = [p for p, predicted in self.seen[:STARTS] if predicted.fits and p not in done]
            if not starts:
                return
            point = starts[0]
            done.add(point)
            for other in self._neighbours(point):
                if self._may_win(other) and self._is_promising(other):
                    self._simulate(other)

    def _neighbours(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield points that differ only in schedules, then in one dimension, best estimates first.
        Degrees count as one dimension, with the number of micro-batches that suits them."""
        yield from self._variants(point)
        is_beside = self.space.leaves_out(point)
        like = point.with_value(recompute="layer") if is_beside else point
        near: dict[JointPoint, None] = {}
        meshes: dict[tuple[object, ...], JointPoint] = {}
        for other in self._by_estimate(self.estimates):
            changed = other.changed_from(like)
            if len(changed) == 1 and "mesh" not in changed:
                near[other] = None
            if changed == {"mesh"} or changed == {"mesh", "micro_batches"}:
                key = other.replica, other.data, other.tensor, other.stages
                if meshes.setdefault(key, other) is other or changed == {"mesh"}:
                    near[other] = None
        for other in near:
            if is_beside:
                yield from self.space.keeping_products(other)
                continue
            # As the point has it, if it can: schedules are no dimension of what is estimated.
            schedules = {name: getattr(point, name) for name in ORDERS}
            same = other.with_value(**schedules) if other.stages > 1 else other
            yield other
            known = self.evaluator.simulated.get(other)
            if known is not None and not known.fits:
                yield from self.space.keeping_products(other)
            filled = other.with_value(pipeline=FILLING) if _has_bubbles(other) else other
            for variant in (same, filled):
                is_allowed = self.space.constraints.allows(variant)
                if variant != other and is_allowed and self.space.is_possible(variant):
                    yield variant

    def _variants(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield the point under other orders and, if it recomputes or does not fit, with the policy
        `after-products`. For a deep model the best estimates come first."""
        orders = (v for v in self.space.variants(point) if v.has_order)
        variants = chain(orders, self._keeping_products(point))
        if not self.evaluator.depths.is_deep:
            return variants
        return iter(self._by_estimate([other for other in variants if self._may_win(other)]))

    def _keeping_products(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield the point with policy `after-products`, if it recomputes or does not fit."""
        known = self.evaluator.simulated.get(point)
        if point.recompute != "none" or (known is not None and not known.fits):
            yield from self.space.keeping_products(point)

    def _recompute_less(self) -> None:
        """Bisect the fewest recomputed layers per stage that fit, for the fastest points that
        recompute, while there is time. Assumes that more layers take longer, and fit if
        fewer do. These few simulations may exceed the allowed number."""
        again = [p for p, predicted in self.seen if predicted.fits and p.recompute != "none"]
        limit_s = self.best[1].time_s if self.best else 0.0
        for point in again[:STARTS]:
            keeping = point.with_value(recompute="none", recompute_layers=0)
            if self.space.constraints.allows(keeping):
                least = self.evaluator.predict(keeping)
                if least is not None and least.time_s >= limit_s:
                    continue
            fewer = self.space.fewer_layers(point)
            low, high = -1, len(fewer)
            while high - low > 1 and time.monotonic() <= self.deadline_s:
                middle = (low + high) // 2
                tried = self.evaluator.predict(fewer[middle])
                low, high = (low, middle) if tried is not None and tried.fits else (middle, high)

    def _spare_memory(self) -> None:
        """Simulate points that lack memory with the values of `SPARING`, while there is time: the
        fastest ones, or, while nothing fits, those that then take the least memory. These few
        simulations may exceed the allowed number."""
        sparing = Sparing(self.space, self.estimator, self.capacity)
        for dimension in SPARING:
            for point in self._lacking(dimension, STARTS):
                limit_s = self.best[1].time_s if self.best else math.inf
                for other in sparing.others(point, dimension, limit_s):
                    if time.monotonic() <= self.deadline_s:
                        predicted = self.evaluator.predict(other)
                        if predicted is None or predicted.fits:
                            break

    def _lacking(self, dimension: str, most: int, *, is_bound: bool = False) -> list[JointPoint]:
        best, sparing = self.best, Sparing(self.space, self.estimator, self.capacity)
        priced = {**self.over, **self.estimates, **self.evaluator.simulated}
        limit_s = best[1].time_s if best else math.inf
        lacking = sparing.lacking(priced, dimension, limit_s, is_bound=is_bound)
        return [*islice((p for p, first in lacking if not self._is_seen(first)), most)]

    def _decompose(self) -> None:
        """Decompose the products of the fastest points that could win if they exposed no message,
        while there is time. These few simulations may exceed the allowed number."""
        limit_s = self.best[1].time_s if self.best else 0.0
        usual = {name: getattr(JointPoint, name) for name in ORDERS}
        fastest: dict[JointPoint, JointPoint] = {}
        for point, seen in self.seen:
            if seen.fits and point.chooses("decompose") and seen.time_s - seen.exposed_s < limit_s:
                fastest.setdefault(point.with_value(**usual), point)
        for point in [*fastest.values()][:STARTS]:
            other = point.with_value(decompose=True)
            if time.monotonic() <= self.deadline_s and self.space.constraints.allows(other):
                self.evaluator.predict(other)

    def _see_rest(self) -> None:
        """Simulate all points that may be the fastest; those that `_waits` put off come last."""
        self._see_left()
        self._estimate_waiting(may_wait=False)
        self._see_left()

    def _see_left(self) -> None:
        while (point := next(self._left(), None)) is not None:
            self._simulate(point)

    def _left(self) -> Iterator[JointPoint]:
        for point in self._by_estimate(self.estimates):
            if not self._may_win(point):
                continue
            if not self._is_seen(point):
                yield point
            elif self._is_near(point):
                yield from (v for v in self._variants(point) if not self._is_seen(v))

    def _is_near(self, point: JointPoint) -> bool:
        """True if another schedule may make a simulated point the fastest, or let it fit."""
        known = self.evaluator.simulated.get(point)
        if known is None:
            return False
        return self._is_fast(known) and known.peak_bytes <= NEAR * self.capacity

    def _is_fast(self, predicted: Predicted) -> bool:
        best = self.best
        return best is None or predicted.time_s <= NEAR * best[1].time_s

    def _is_seen(self, point: JointPoint) -> bool:
        return point in self.evaluator.simulated or point in self.evaluator.problems

    def _may_win(self, point: JointPoint) -> bool:
        """True if a point may fit and be the fastest, by its estimate and bounds."""
        key = point
        if key not in self.estimates:
            try:
                self.estimates[key] = self.estimator.estimate(key)
            except ValueError:
                return False
        estimate = self.estimates[key]
        if estimate.memory_bytes > MAY_FIT * self.capacity:
            return False
        best = self.best
        if best is None:
            return True
        # A point near the best with 1f1b is kept: orders that fill stages sooner may win.
        near = 1.0 if self.evaluator.depths.is_deep else NEAR
        filling_s = estimate.filling_s / near if point.pipeline in FILLED_LATE else 0.0
        return max(estimate.bound_s, filling_s) < best[1].time_s

    def _is_promising(self, point: JointPoint) -> bool:
        """True if a point's estimate is near the best time; true if the model is not deep."""
        best = self.best
        if best is None or not self.evaluator.depths.is_deep:
            return True
        return self.estimates[point].time_s <= TRUSTED * best[1].time_s

    def _by_estimate(self, points: Iterable[JointPoint]) -> list[JointPoint]:
        return sorted(points, key=self._rank)

    def _rank(self, point: JointPoint) -> tuple[object, ...]:
        """Sort key of a point by its estimate, cached because every step sorts by it."""
        rank = self._ranks.get(point)
        if rank is None:
            estimate = self.estimates[point]
            share = estimate.memory_bytes / self.capacity
            # Points that may not fit rank after those that surely do, before those that cannot.
            time_s = estimate.time_s * (UNSURE if share > 1 else 1.05 if share > FITS_SURELY else 1)
            most = 1.0 if self.evaluator.depths.is_deep else LIKELY_FITS
            rank = self._ranks[point] = share > most, time_s, plainness(point)
        return rank

    def _simulate(self, point: JointPoint) -> None:
        """Simulate a point; if it does not fit but is near the best, its `BALANCED` variant too."""
        if self._is_seen(point):
            return
        self._predict(point)
        known = self.evaluator.simulated.get(point)
        if known is not None and not known.fits and _has_bubbles(point) and self._is_fast(known):
            for other in self.space.variants(point):
                if (other.pipeline, other.schedule) == (BALANCED, point.schedule):
                    self._simulate(other)

    def _predict(self, point: JointPoint) -> None:
        self._check_time()
        allowed = self.allowed
        if len(self.evaluator.simulated) >= allowed:
            raise OutOfTime(
                f"the search stopped after simulating {counted(allowed, 'candidate plan')}, its "
                f"limit; raise the limit by -O simulate={2 * self.simulate}"
            )
        each = COLLECT_EACH_DEEP if self.evaluator.depths.is_deep else COLLECT_EACH
        if self.evaluator.predict(point) and len(self.evaluator.simulated) % each == 0:
            gc.collect()
        best = self.best
        told = f"best {seconds_text(best[1].time_s)} ({best[0]})" if best else "none fits so far"
        seen = f"{len(self.estimates)} points estimated, {len(self.evaluator.simulated)}"
        self.say(f"{seen} of at most {allowed} simulated; {told}")

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise OutOfTime("the search ran out of time")

    def say(self, text: str) -> None:
        if self.tell is not None:
            self.tell(text)


def _has_bubbles(point: JointPoint) -> bool:
    return point.stages > 1 and point.micro_batches > 1 and point.pipeline in FILLED_LATE
