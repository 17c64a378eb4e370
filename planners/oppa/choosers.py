"""Choosers of the next trial.

Given the trials so far, each chooses a row of the table of configurations. A row that was tried is
never chosen again, so that a search ends at the latest when all were tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from scipy.special import ndtr

from shardweave.planners.oppa.gp import Belief, fit
from shardweave.planners.oppa.prior import Formula, MemoryPrior, Samples, ThroughputPrior
from shardweave.planners.trials.space import Floats, SpaceTable
from shardweave.planners.trials.trials import Record

STREAK = 3
"""Consecutive out-of-memory trials after which the next is random (as in the released code)."""

FAILED_MEMORY = 1.2
"""Memory assumed for an out-of-memory trial, over the device's (as in the released code)."""

NOISE = 0.01
"""Least relative deviation of a throughput: two runs differ more than the steps of one."""

FITTED_EACH = 30
FITTED_EVERY = 5

MEMORY_NOISE = 0.01
"""Standard deviation of a measured peak, as a share of the memory."""


@dataclass(frozen=True)
class History:
    """The trials so far, and the row of the table that each of them tried.

    memory_bytes: of a device; None if unknown: only trials that ran out of memory then count as too
    large.
    """

    table: SpaceTable
    rows: Sequence[int]
    records: Sequence[Record]
    memory_bytes: float | None

    @property
    def open_rows(self) -> list[int]:
        """Rows that were not tried; there is at least one."""
        tried = set(self.rows)
        return [row for row in range(len(self.table.configurations)) if row not in tried]

    @property
    def open_by_degrees(self) -> dict[tuple[int, ...], list[int]]:
        """Untried rows, grouped by the degrees of their configurations."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for row in self.open_rows:
            rows.setdefault(self.table.configurations[row].degrees, []).append(row)
        return rows

    def fits(self, record: Record) -> bool:
        """True if a trial ran, within the memory."""
        peak, limit = record.outcome.peak_bytes, self.memory_bytes
        is_within = peak is None or limit is None or peak <= limit
        return record.outcome.status == "ok" and is_within

    @property
    def scale(self) -> float:
        """Throughput of the first trial that ran, the unit of all throughputs; 0 if none ran."""
        ran = (r.outcome.throughput for r in self.records if r.outcome.status == "ok")
        return next(ran, 0.0)

    def first(self, count: int) -> History:
        """The history of the first `count` trials."""
        return replace(self, rows=self.rows[:count], records=self.records[:count])

    def throughputs(self) -> Samples | None:
        """Throughputs of all trials over `scale`, the lowest for failed ones; None if none ran."""
        scale = self.scale
        if scale == 0:
            return None
        ran = [r.outcome for r in self.records if r.outcome.status == "ok"]
        slowest = min(o.throughput for o in ran)
        rows: list[int] = []
        values: list[tuple[float, float]] = []
        for row, record in zip(self.rows, self.records, strict=True):
            outcome = record.outcome
            if outcome.status == "out_of_memory":
                continue
            mean = outcome.throughput if outcome.status == "ok" else slowest
            variance = outcome.variance if outcome.status == "ok" else 0.0
            rows.append(row)
            values.append((np.log(mean / scale), variance / mean**2 + NOISE**2))
        stacked = np.array(values)
        return Samples(self.table.rows(rows), stacked[:, 0], stacked[:, 1])

    def memories(self) -> Samples | None:
        """Peak memory as a share of the device's; None if no peak is known."""
        if self.memory_bytes is None:
            return None
        rows: list[int] = []
        values: list[float] = []
        for row, record in zip(self.rows, self.records, strict=True):
            outcome = record.outcome
            if outcome.status == "out_of_memory":
                values.append(FAILED_MEMORY)
            elif outcome.peak_bytes is not None:
                values.append(min(outcome.peak_bytes / self.memory_bytes, FAILED_MEMORY))
            else:
                continue
            rows.append(row)
        if not rows:
            return None
        return Samples(self.table.rows(rows), np.array(values), np.full(len(rows), MEMORY_NOISE**2))


@dataclass(frozen=True)
class Suggestion:
    """A row to try, and why."""

    row: int
    reason: str


class Chooser(Protocol):
    """A strategy of search."""

    def choose(self, history: History, rng: np.random.Generator) -> Suggestion:
        """The next row; at least one is open."""
        ...


def first_choice(history: History, rng: np.random.Generator) -> Suggestion:
    """Pick a random row among those whose degrees were tried least, to try all of them soon."""
    by_degrees = history.open_by_degrees
    tried = Counter[tuple[int, ...]](r.configuration.degrees for r in history.records)
    fewest = min(tried[degrees] for degrees in by_degrees)
    least = [rows for degrees, rows in by_degrees.items() if tried[degrees] == fewest]
    return Suggestion(_drawn(least, rng), "random: one of the first")


def _drawn(groups: Sequence[Sequence[int]], rng: np.random.Generator) -> int:
    """Draw one of the groups, all equally likely, then one of its rows (D.5)."""
    return int(rng.choice(groups[int(rng.integers(len(groups)))]))


def random_instead(history: History, first: int, rng: np.random.Generator) -> Suggestion | None:
    """Pick a random row for the first trials, while none has run, and after `STREAK` trials that
    ran out of memory; else None."""
    if len(history.records) < first or history.scale == 0:
        return first_choice(history, rng)
    last = [record.outcome.status for record in history.records[-STREAK:]]
    if len(last) == STREAK and set(last) == {"out_of_memory"}:
        row = _drawn([*history.open_by_degrees.values()], rng)
        return Suggestion(row, f"random: the last {STREAK} ran out of memory")
    return None


@dataclass(frozen=True)
class BayesianChooser:
    """Chooses by constrained expected improvement over Gaussian processes of throughput and memory.

    throughput, memory: formulas for the mean of each process; None: a constant mean, as in standard
    Bayesian optimisation. first: number of random trials at the start. The processes always use all
    trials; the parameters of kernels and formulas are refitted after each of the first
    `FITTED_EACH` trials, and after every `FITTED_EVERY`th from there on.
    """

    throughput: Formula | None = field(default_factory=ThroughputPrior)
    memory: Formula | None = field(default_factory=MemoryPrior)
    first: int = 5
    _last: dict[str, tuple[Sequence[Record], Belief]] = field(
        default_factory=dict[str, tuple[Sequence[Record], Belief]],
        init=False,
        compare=False,
        repr=False,
    )

    def choose(self, history: History, rng: np.random.Generator) -> Suggestion:
        """Choose the open row with the largest expected improvement."""
        instead = random_instead(history, self.first, rng)
        seen = history.throughputs()
        if instead is not None or seen is None:
            return instead or first_choice(history, rng)
        rows = history.open_rows
        there = history.table.rows(rows)
        throughput, memory = self.beliefs(history, seen, there)
        kept = [r.outcome.throughput for r in history.records if history.fits(r)]
        best = np.log(max(kept, default=1e-9) / history.scale)
        gain = constrained_improvement(throughput, memory, best, 1.0)
        if not gain.any():
            row = _drawn([*history.open_by_degrees.values()], rng)
            return Suggestion(row, "random: no gain is expected anywhere")
        index = int(np.argmax(gain))
        return Suggestion(rows[index], _expectation(history, throughput, memory, index))

    def beliefs(
        self, history: History, seen: Samples, there: SpaceTable
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Beliefs (mean, variance) about throughput over `scale`, memory over a device's."""
        throughput = self._fit(history, seen, "throughputs", self.throughput).at(there)
        used = history.memories()
        if used is None:
            nothing = np.zeros(len(there.configurations))
            return throughput, (nothing, nothing)
        return throughput, self._fit(history, used, "memories", self.memory).at(there)

    def _fit(
        self, history: History, samples: Samples, what: str, formula: Formula | None
    ) -> Belief:
        """The belief about all samples, with parameters from the last trial after which a fit was
        due. They depend on the trials alone, so that a resumed search goes on the same. what: the
        method of `History` that gives the samples."""
        count = len(history.records)
        known = history.first(count if count <= FITTED_EACH else count - count % FITTED_EVERY)
        of_known: Samples | None = getattr(known, what)()
        if of_known is None:
            return fit(samples, formula)
        trials, belief = self._last.get(what, ((), None))
        if belief is None or trials != known.records:
            belief = fit(of_known, formula)
            self._last[what] = (known.records, belief)
        return replace(belief, samples=samples)


def _expectation(
    history: History, throughput: tuple[Floats, Floats], memory: tuple[Floats, Floats], index: int
) -> str:
    mean = np.exp(throughput[0][index])
    deviation = mean * throughput[1][index] ** 0.5
    text = f"expected {mean * history.scale:.4g} +- {deviation * history.scale:.2g} steps/s"
    if history.memory_bytes is None:
        return text
    return f"{text}, {memory[0][index]:.0%} of the memory"


_SQRT_2_PI = float(np.sqrt(2 * np.pi))


def expected_improvement(mean: Floats, variance: Floats, best: float) -> Floats:
    """E[max(r - best, 0)] for normal r; max(mean - best, 0) for zero variance."""
    gain = mean - best
    deviation = np.sqrt(np.maximum(variance, 0.0))  # (22) lacks the root
    is_known = deviation == 0
    z = gain / np.where(is_known, 1.0, deviation)
    density = np.exp(-0.5 * z * z) / _SQRT_2_PI
    expected = gain * ndtr(z) + deviation * density
    return np.where(is_known, np.maximum(gain, 0.0), np.maximum(expected, 0.0))


def chance_below(mean: Floats, variance: Floats, limit: float) -> Floats:
    """P(m <= limit) for normal m."""
    deviation = np.sqrt(np.maximum(variance, 0.0))
    is_known = deviation == 0
    chance: Floats = ndtr((limit - mean) / np.where(is_known, 1.0, deviation))
    return np.where(is_known, (mean <= limit).astype(np.float64), chance)


def constrained_improvement(
    throughput: tuple[Floats, Floats], memory: tuple[Floats, Floats], best: float, limit: float
) -> Floats:
    """E[max(r - best, 0)] P(m <= limit), given beliefs (mean, variance). best: that fitted."""
    return expected_improvement(*throughput, best) * chance_below(*memory, limit)
