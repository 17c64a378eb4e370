"""The search: bound every point, simulate the most promising, and say what each choice is worth.

1. Every point that cuts no sequence over devices of its own is estimated from its blocks
   (`estimate`), and bounded from below. Of a deep model those whose blocks are read for them alone
   wait until something as fast as they can be is known (`_waits`).
2. The best estimate of each value of each dimension is simulated: every choice at its best.
   Steps with stages that are fast and do not fit are simulated under an order that may, too.
3. From the fastest so far, all points that differ in one dimension are simulated, and under other
   schedules, until none is faster; then the same from the next fastest.
4. With the tensor degree of the fastest, and without a tensor axis, points that cut sequences are
   estimated, of each size of that axis the best is simulated, and 3 is done again.
5. Of the fastest that recompute, the fewest layers of each stage that fit are found by bisection.
6. Other points are simulated in order of their estimates, until their bounds exceed the fastest;
   then 5 is done again.

Before 5, and where nothing fits after 2, the fastest points that memory keeps from fitting are
simulated with chunks of the loss, and offloaded.

It can stop at any time with the best so far. If step 6 ends by itself, what was found is the
fastest of the whole space, as far as the bounds hold, but for the number of layers in step 5, for
`SPARING`, and for orders of a single micro-batch, of which 1f1b stands for all.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from shardweave.planners.auto.estimate import FITS_SURELY, Estimator, PointEstimate
from shardweave.planners.auto.evaluate import Evaluator
from shardweave.planners.auto.reader import REPEATING
from shardweave.planners.auto.space.point import DIMENSIONS, MESH, ORDERS, JointPoint
from shardweave.planners.auto.space.space import JointSpace
from shardweave.planners.cost.quantity import counted, seconds_text
from shardweave.planners.plan.plan_parts import Predicted

STARTS = 3
"""From how many of the fastest points neighbours are looked at: more find what one misses."""

MAY_FIT = 2.0
"""Multiple of the memory that an estimate may need and the point still be simulated: of small
models estimates are up to 1.4 times what the simulator counts."""

LIKELY_FITS, UNSURE = 1.25, 1.15
"""Multiple of the memory that the estimate of a small model may need without coming after all
other points, and factor by which it then counts as slower: a GPT of one layer with little memory
had its fastest plans among points whose estimates are 1.2 times the memory."""

NEAR = 1.3
"""Points this many times slower than the fastest, or larger than the memory, are tried under other
schedules too: of a small GPT under a tight memory the best was an order that another point hid."""

FAR = 1.2
"""A value of a dimension whose best estimate is so many times the best of all is not simulated to
begin with, which leaves more of the points that may be simulated to the neighbours of the best."""

TRUSTED = 1.1
"""A deep model's ops are large, so that estimates of its points are at most some 10% above their
steps: values of a dimension, and neighbours of the fastest, whose estimates are further off wait
until all others were seen."""

COLLECT_EACH, COLLECT_EACH_DEEP = 16, 64
"""Simulations between two collections of garbage. Left to itself Python collects while programs
are made, of which most are alive: a third of the time of a small model's simulation. Programs have
cycles, so that never to collect would keep all. Those of a few blocks of a deep model are small."""

FILLED_LATE = ("1f1b", "gpipe")
"""Orders that fill and drain their stages with whole passes."""

FILLING = "zero-bubble"
"""The order that fills bubbles of two stages or more: neighbours that have bubbles are tried with
it at once, since by their estimates, which are those of 1f1b, they come late."""

BALANCED = "zero-bubble-v"
"""The order that puts the first stage and the last on one device, so that no device has most of
what the model ends in: near points with stages that do not fit are tried with it at once. A GPT
with a large vocabulary had its fastest plans there; those without stages took a sixth longer."""

PATIENCE = 4
"""Multiple of the simulations allowed while nothing fits: of a U-Net 2 of 1,729 plans do."""

LATE = 8
"""An eighth of the simulations are added after each that found a faster plan: of a GPT in little
memory the 64th found the first good plan with stages, and the next but one its best order."""

SPARING = {"loss_chunks": (4, 16), "offload": ("inputs", "all")}
"""Dimensions that only spare memory, and the values that are tried: the first compute faster."""

NOTABLE = 0.05
"""Share of the memory from which on sparing is tried."""


class OutOfTime(Exception):
    """The time limit or the number of simulations is reached."""


@dataclass(eq=False)
class JointSearch:
    """A search and its points so far.

    estimates: of all points that can be partitioned and whose state fits. stopped: why it ended
    early, if it did. refused: points whose shardings cannot be. too_large: those whose parameters
    and optimizer alone do not fit; least_state_bytes: of the point that needs least for them.
    """

    space: JointSpace
    estimator: Estimator
    evaluator: Evaluator
    capacity: float
    simulate: int
    deadline_s: float
    tell: Callable[[str], None] | None = None
    estimates: dict[JointPoint, PointEstimate] = field(
        default_factory=dict[JointPoint, PointEstimate]
    )
    stopped: str = ""
    refused: int = 0
    too_large: int = 0
    least_state_bytes: float = float("inf")
    _waiting: list[JointPoint] = field(default_factory=list[JointPoint])
    _least_s: float = math.inf
    _ranks: dict[JointPoint, tuple[object, ...]] = field(
        default_factory=dict[JointPoint, tuple[object, ...]]
    )
    _best: tuple[int, tuple[JointPoint, Predicted] | None] = (0, None)

    def run(self) -> None:
        """Look until nothing is left, time is up, or the user interrupts: then the best so far is
        the answer, among the estimates where nothing was simulated yet."""
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
            self._recompute_less()
            self._see_rest()
        except OutOfTime as reason:
            self.stopped = str(reason)
            self._see_one()
        self._spare_memory()
        self._recompute_less()

    @property
    def seen(self) -> list[tuple[JointPoint, Predicted]]:
        """Simulated points, those that fit first, then by time; of equals the simpler."""
        return sorted(
            self.evaluator.simulated.items(),
            key=lambda item: (not item[1].fits, item[1].time_s, _plainness(item[0])),
        )

    @property
    def best(self) -> tuple[JointPoint, Predicted] | None:
        """The fastest that fits. Asked for each point that may win, and found anew where a point
        was simulated since."""
        count = len(self.evaluator.simulated)
        if self._best[0] != count:
            fitting = [item for item in self.evaluator.simulated.items() if item[1].fits]
            best = min(
                fitting, key=lambda item: (item[1].time_s, _plainness(item[0])), default=None
            )
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
        """Whether no point that was left out can be faster, by its bound."""
        return not self.stopped and not any(True for _ in self._left())

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
                continue
            self.estimates[point] = estimate
            if estimate.memory_bytes <= self.capacity:
                self._least_s = min(self._least_s, estimate.time_s)

    def _waits(self, point: JointPoint) -> bool:
        """Whether blocks of a deep model would have to be read for a point although a twin of it,
        which sends as much and computes less, is too slow by its estimate to be tried so far."""
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
        """Estimate points with an axis of sequences, and simulate the best of each size of it."""
        degrees = (1, self.best[0].tensor) if self.best else self.space.cuts.tensor
        known = set(self.estimates)
        for tensor in dict.fromkeys(degrees):
            self._estimate_all(self.space.sequence_points(tensor))
        self._see_each_value([point for point in self.estimates if point not in known])

    def _see_each_value(self, points: Iterable[JointPoint]) -> None:
        """Simulate the best estimate overall, then that of each value of each dimension, with half
        of the simulations at most: the other half is for the neighbours of the fastest."""
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
            # Memory decides: what needs least comes first.
            rest = sorted(order, key=lambda p: self.estimates[p].memory_bytes)
            for point in rest:
                self._simulate(point)
                if self.best is not None:
                    break

    def _see_one(self) -> None:
        """Simulate the best estimate so far, where time was up before any simulation."""
        for point in self._by_estimate(self.estimates)[:STARTS]:
            if self.evaluator.simulated:
                return
            self.evaluator.predict(point)

    def _refine(self) -> None:
        """Change one dimension of the fastest points, until nothing is faster."""
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
        """Points that differ in schedules alone, then in one dimension, the best estimates first;
        the degrees change together, and with them the micro-batches that suit them."""
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
        """The point under other orders, and where it has to compute something again, by another
        policy: of a deep model, whose simulations are few, the best estimates first."""
        orders = filter(_has_order, self.space.variants(point))
        variants = chain(orders, self._keeping_products(point))
        if not self.evaluator.depths.is_deep:
            return variants
        return iter(self._by_estimate([other for other in variants if self._may_win(other)]))

    def _keeping_products(self, point: JointPoint) -> Iterator[JointPoint]:
        """Yield points that keep more than a recomputing one, or less than one too large."""
        known = self.evaluator.simulated.get(point)
        if point.recompute != "none" or (known is not None and not known.fits):
            yield from self.space.keeping_products(point)

    def _recompute_less(self) -> None:
        """Of the fastest that recompute anything, the fewest layers of each stage with which they
        fit: a few simulations more than are allowed, while there is time. Where that many layers
        fit more do, and take longer."""
        again = [p for p, predicted in self.seen if predicted.fits and p.recompute != "none"]
        for point in again[:STARTS]:
            fewer = self.space.fewer_layers(point)
            low, high = -1, len(fewer)
            while high - low > 1 and time.monotonic() <= self.deadline_s:
                middle = (low + high) // 2
                tried = self.evaluator.predict(fewer[middle])
                low, high = (low, middle) if tried is not None and tried.fits else (middle, high)

    def _spare_memory(self) -> None:
        """Of points faster than the best that lack memory, the fastest as `SPARING` has them: a few
        simulations more than are allowed, while there is time."""
        for dimension, values in SPARING.items():
            for point in self._lacking(dimension):
                for other in (point.with_value(**{dimension: value}) for value in values):
                    if time.monotonic() <= self.deadline_s and self.space.constraints.allows(other):
                        predicted = self.evaluator.predict(other)
                        if predicted is None or predicted.fits:
                            break

    def _lacking(self, dimension: str) -> list[JointPoint]:
        limit_s = self.best[1].time_s if self.best else math.inf
        times_s, simulated = dict[JointPoint, float](), self.evaluator.simulated
        for point in {**self.estimates, **simulated}:
            seen, spared = simulated.get(point), self.estimator.spared_bytes(point, dimension)
            peak = seen.peak_bytes if seen else self.estimates[point].memory_bytes
            time_s = seen.time_s if seen else self.estimates[point].time_s
            fits_only_so = peak - spared <= self.capacity < peak
            if time_s < limit_s and fits_only_so and spared > NOTABLE * self.capacity:
                times_s[point] = time_s
        return sorted(times_s, key=times_s.__getitem__)[:STARTS]

    def _see_rest(self) -> None:
        """Simulate what may win, and what waits with its twins last: it takes long to estimate."""
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
        """Whether another schedule may make a simulated point the fastest, or let it fit."""
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
        """Whether a point can be faster than the fastest, and fit, by its blocks."""
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
        # Orders of micro-batches that fill stages sooner are tried on what is near with 1f1b.
        near = 1.0 if self.evaluator.depths.is_deep else NEAR
        filling_s = estimate.filling_s / near if point.pipeline in FILLED_LATE else 0.0
        return max(estimate.bound_s, filling_s) < best[1].time_s

    def _is_promising(self, point: JointPoint) -> bool:
        """Whether a deep model's point is worth a simulation before others, by its estimate."""
        best = self.best
        if best is None or not self.evaluator.depths.is_deep:
            return True
        return self.estimates[point].time_s <= TRUSTED * best[1].time_s

    def _by_estimate(self, points: Iterable[JointPoint]) -> list[JointPoint]:
        return sorted(points, key=self._rank)

    def _rank(self, point: JointPoint) -> tuple[object, ...]:
        """A point's place by its estimate: it does not change, and is asked for at each step."""
        rank = self._ranks.get(point)
        if rank is None:
            estimate = self.estimates[point]
            share = estimate.memory_bytes / self.capacity
            # What may not fit comes behind what surely does, but before what surely does not.
            time_s = estimate.time_s * (UNSURE if share > 1 else 1.05 if share > FITS_SURELY else 1)
            most = 1.0 if self.evaluator.depths.is_deep else LIKELY_FITS
            rank = self._ranks[point] = share > most, time_s, _plainness(point)
        return rank

    def _simulate(self, point: JointPoint) -> None:
        """Simulate a point, and beside it the order of micro-batches that may let it fit."""
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
                f"{counted(allowed, 'point', 'was')} simulated, the limit but for points that "
                f"recompute less; raise it by -O simulate={2 * self.simulate}"
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
            raise OutOfTime("its time was up")

    def say(self, text: str) -> None:
        if self.tell is not None:
            self.tell(text)


def _has_order(point: JointPoint) -> bool:
    return point.micro_batches > 1 or point.pipeline == JointPoint.pipeline


def _has_bubbles(point: JointPoint) -> bool:
    return point.stages > 1 and point.micro_batches > 1 and point.pipeline in FILLED_LATE


def _plainness(point: JointPoint) -> tuple[int, str]:
    """Of points that take as long, the plainer goes first: that with less that is not usual."""
    usual = JointPoint()
    odd = sum(point.value(name) != usual.value(name) for name in DIMENSIONS if name not in MESH)
    return odd, str(point)
