"""Exact partition of a pipeline: which layers go to which stage.

AMP (Li et al., NeurIPS 2022, Sec. 4.2) minimises `repeats * max t_s + sum t_s + sum e_s` over all
cuts of L layers into k stages, where t_s is a stage's time and e_s the time to send across the
boundary after it. The paper's dynamic program is O(k L^4). Here only the O(L^2) possible stage
times are tried as a bound T on all stages. C(T), the least `sum t_s + sum e_s` with no stage above
T, is a dynamic program over window minima in O(k L log L). It falls as T grows, so that divide and
conquer with the bound `repeats * T_left + C(T_right)` leaves few T to try. Sorting them takes O(L^2
log L); up to O(L^2), usually about ten, need a program.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_SLACK = 1e-12
"""Tolerance, as a share of the whole: stage times are differences of sums, equal up to rounding."""


@dataclass(frozen=True)
class Problem:
    """Layers to be cut into stages of at least one layer.

    times: seconds of each layer on each kind of stage, kinds x L, none negative. kinds: the kind of
    each stage, k of them. boundary: seconds that a cut before layer j costs after each stage but
    the last, (k - 1) x (L + 1). repeats: how often the slowest stage counts besides once: the
    number of micro-batches less one. first: by stage and end j, the earliest layer at which a stage
    that ends before layer j may begin, k x (L + 1), growing with j; None: any layer.
    """

    times: Floats
    kinds: Sequence[int]
    boundary: Floats
    repeats: float
    first: Ints | None = None


@dataclass(frozen=True)
class Partition:
    """A division into stages. cuts: 0, then each stage's end. seconds: value of the objective."""

    cuts: tuple[int, ...]
    seconds: float


def exact_cuts(problem: Problem) -> Partition | None:
    """Find the best cuts, exactly up to rounding; None if no cuts satisfy `problem.first`.
    Objective: repeats * (slowest stage) + all stages + all boundaries, in seconds."""
    layers, stages = problem.times.shape[1], len(problem.kinds)
    if stages > layers:
        return None
    program = _WindowProgram(problem)
    least, cuts = program.solve(math.inf, want_cuts=True)
    if cuts is None:
        return None
    slowest = _bottleneck(program.prefix, problem.kinds, cuts)
    if problem.repeats > 0 and stages > 1:
        goal = _best_bottleneck(problem, program, least, slowest)
        if goal is not None:
            cuts = program.solve(goal, want_cuts=True)[1]
            assert cuts is not None
    slowest = _bottleneck(program.prefix, problem.kinds, cuts)
    seconds = problem.repeats * slowest + objective_without_bottleneck(problem, cuts)
    return Partition(cuts, seconds)


def objective_without_bottleneck(problem: Problem, cuts: Sequence[int]) -> float:
    """Seconds of all stages and all boundaries under some cuts."""
    stages = range(len(problem.kinds))
    work = sum(float(problem.times[problem.kinds[s], cuts[s] : cuts[s + 1]].sum()) for s in stages)
    return work + sum(float(problem.boundary[s, cuts[s + 1]]) for s in stages[:-1])


def _bottleneck(prefix: Floats, kinds: Sequence[int], cuts: Sequence[int]) -> float:
    return max(
        float(prefix[kind, cuts[s + 1]] - prefix[kind, cuts[s]]) for s, kind in enumerate(kinds)
    )


def _best_bottleneck(
    problem: Problem, program: _WindowProgram, least: float, slowest: float
) -> float | None:
    """The bound on stage times that gives the best cuts; None if no bound is best. least: C without
    a bound. slowest: the slowest stage of the unbounded cuts."""
    repeats = problem.repeats
    kinds = sorted(set(problem.kinds))
    # Were every layer on the stage where it is fastest, the stages' mean would be this.
    fewest = float(problem.times[kinds].min(axis=0).sum()) / len(problem.kinds)
    sums = _stage_times(program.prefix, kinds, fewest, slowest)
    low = _first_feasible(problem, program, sums)
    known: dict[int, float] = {len(sums): least}  # C by index; past the end: no bound
    best, goal = repeats * slowest + least, None
    left, right = low - 1, len(sums)
    known[left] = math.inf
    todo = [(left, right)]
    while todo:
        left, right = todo.pop()
        # Whoever is right of this has a bottleneck that costs more than all it can save.
        right_limit = (best - known[right]) / repeats
        end = min(right, int(np.searchsorted(sums, right_limit)))
        if end - left <= 1:
            continue
        # A small bottleneck matters most; the first probe is therefore the smallest one.
        middle = left + 1 if math.isinf(known[left]) and left == low - 1 else (left + end) // 2
        cost, _ = program.solve(float(sums[middle]))
        known[middle] = cost
        total = repeats * float(sums[middle]) + cost
        if total < best:
            best, goal = total, float(sums[middle])
        todo.append((middle, right))
        if math.isfinite(cost):
            todo.append((left, middle))
    return goal


def _stage_times(prefix: Floats, kinds: Sequence[int], least: float, most: float) -> Floats:
    low, high = least * (1 - 1e-9), most * (1 + 1e-9)
    ranges: list[Floats] = []
    for kind in kinds:
        sums = np.subtract.outer(prefix[kind], prefix[kind])
        ranges.append(sums[(sums >= low) & (sums <= high)])
    return np.unique(np.concatenate(ranges))


def _first_feasible(problem: Problem, program: _WindowProgram, sums: Floats) -> int:
    """Index of the smallest sum with which greedy cutting succeeds. No other cutting succeeds with
    a smaller sum, since greedy stages reach at least as far as any others."""
    prefixes = [prefix.tolist() for prefix in program.prefix]
    limits = [None] * len(problem.kinds) if problem.first is None else problem.first.tolist()
    slack = program.slack

    def reaches_end(bound: float) -> bool:
        position = 0
        for kind, first in zip(problem.kinds, limits, strict=True):
            prefix = prefixes[kind]
            end = bisect_right(prefix, prefix[position] + bound + slack) - 1
            position = end if first is None else min(end, bisect_right(first, position) - 1)
        return position >= len(prefixes[0]) - 1

    low, high = 0, len(sums)
    while low < high:
        middle = (low + high) // 2
        if reaches_end(float(sums[middle])):
            high = middle
        else:
            low = middle + 1
    return low


def earliest(prefix: Floats, most: float) -> Ints:
    """For each end j, the first i with prefix[j] - prefix[i] <= most. prefix: non-decreasing."""
    lefts: Ints = np.searchsorted(prefix, prefix - most).astype(np.intp)
    return lefts


class _WindowProgram:
    """C(T): the dynamic program over stages, with window minima by doubling."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        layers, stages = problem.times.shape[1], len(problem.kinds)
        self.prefix: Floats = np.zeros((len(problem.times), layers + 1))
        np.cumsum(problem.times, axis=1, out=self.prefix[:, 1:])
        self.slack = _SLACK * float(self.prefix[:, -1].max())
        self._kinds: Ints = np.array(problem.kinds, dtype=np.intp)
        of_stage = self.prefix[self._kinds]
        # Costs are kept less the prefix sum of their own stage, so that a stage's time, a
        # difference of two prefix sums, needs no dimension of its own.
        self._step: Floats = problem.boundary + of_stage[:-1] - of_stage[1:]
        self._ends: Ints = np.arange(layers + 1, dtype=np.intp)
        self._log: Ints = np.array([0, *(int(n).bit_length() - 1 for n in range(1, layers + 2))])
        self._floor: Ints = np.zeros((stages, layers + 1), dtype=np.intp)
        if problem.first is not None:
            self._floor = np.maximum(self._floor, problem.first)
        rows = int(self._log[layers]) + 1
        self._table: Floats = np.full((rows + 1, layers + 1), np.inf)  # the last row: no window
        self._rows = rows

    def solve(
        self, bound: float, *, want_cuts: bool = False
    ) -> tuple[float, tuple[int, ...] | None]:
        """Return C(bound), the least cost if no stage takes longer than `bound`, infinite if there
        are no such cuts; and the cuts if `want_cuts`."""
        first = self._windows(bound)
        size = len(self._ends)
        length: Ints = self._ends - first
        power: Ints = self._log[np.maximum(length, 0)]
        none = self._rows * size
        left: Ints = np.where(length > 0, power * size + first, none)
        right: Ints = np.where(length > 0, power * size + self._ends - (1 << power), none)
        levels = int(power.max())
        table = self._table
        flat: Floats = table.reshape(-1)
        # Stage 0 begins at layer 0, at no cost.
        cost: Floats = np.where((first[0] <= 0) & (length[0] > 0), 0.0, np.inf)
        entries: list[Floats] = []
        for stage, step in enumerate(self._step, start=1):
            np.add(cost, step, out=table[0])
            if want_cuts:
                entries.append(table[0].copy())
            for level in range(levels):
                half = 1 << level
                np.minimum(table[level, :-half], table[level, half:], out=table[level + 1, :-half])
            cost = np.minimum(flat[left[stage]], flat[right[stage]])
        least = float(cost[-1] + self.prefix[self._kinds[-1], -1])
        if not want_cuts or math.isinf(least):
            return least, None
        cuts = [size - 1]
        for stage in range(len(first) - 1, 0, -1):
            start, end = int(first[stage, cuts[-1]]), cuts[-1]
            cuts.append(start + int(entries[stage - 1][start:end].argmin()))
        return least, (0, *reversed(cuts))

    def _windows(self, bound: float) -> Ints:
        """For each stage and end, the earliest start that keeps the stage within the bound."""
        if math.isinf(bound):
            return self._floor
        lows = [earliest(prefix, bound + self.slack) for prefix in self.prefix]
        return np.maximum(np.stack(lows)[self._kinds], self._floor)
