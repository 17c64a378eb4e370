"""`list`: all stages ordered at once by what they take, with I and W free to move.

List scheduling under a bound on the micro-batches in flight, as in the heuristic of Qi et al. 2024
(Sec. 3.1): backward passes to the input go first, forward passes as far ahead as memory allows, and
weight gradients fill what is left. It is tried with several bounds and choices, and the orders of
the other schedules are among the candidates, so that it is never slower than they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

from shardweave.planners.pipelines.table import Action, Kind, Table, in_order

GAPS = (0.0, 0.5, 1.0)
"""A weight gradient waits if what comes before it is known to be there after less than this share
of its own time."""


MOST_PASSES = 60_000
"""So many passes are put in order in all attempts together, which takes about a second."""


@dataclass(frozen=True)
class PassCosts:
    """Seconds of each pass of a micro-batch, by stage and kind `F`, `I` or `W`, and of messages by
    the stages that they go from and to. What is not said takes no time."""

    seconds: Mapping[tuple[int, Kind], float]
    message_s: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def arrives_s(self, source: int, goal: int, end_s: float) -> float:
        return end_s + self.message_s.get((source, goal), 0.0)


def unit_costs(num_stages: int) -> PassCosts:
    """A second for each pass, and none for messages."""
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    return PassCosts({(stage, kind): 1.0 for stage in range(num_stages) for kind in kinds})


Fits = Callable[[Table], bool]
"""Whether the memory of all ranks is enough for an order."""


def list_table(
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    costs: PassCosts | None = None,
    others: Sequence[Table] = (),
    fits: Fits | None = None,
) -> Table:
    """The fastest order found that fits; it has no whole backward passes.

    others: orders to beat. fits: by default, fewer than twice as many micro-batches in flight as
    the first rank has in 1F1B, as in ZB-H2. Raises ValueError if none fits.
    """
    found = costs or unit_costs(ranks * chunks)
    candidates = [_split(table) for table in others]
    most = max(1, MOST_PASSES // (3 * ranks * chunks * micro_batches))
    attempts = product(_policies(ranks, micro_batches, chunks), _placements(ranks, chunks))
    for policy, places in islice(attempts, most):
        table = _Greedy(places, ranks, micro_batches, found, policy).table()
        if table is not None:
            candidates.append(table)
    ranked = {
        table: (_rounded(time_of(table, ranks * chunks, found)), most_in_flight(table))
        for table in dict.fromkeys(candidates)
    }
    limit = 2 * ranks * chunks
    best = next(
        (
            table
            for table in sorted(ranked, key=ranked.__getitem__)
            if (ranked[table][1] < limit if fits is None else fits(table))
        ),
        None,
    )
    if best is None:
        raise ValueError(
            f"schedule 'list': no order of {micro_batches} micro-batches on {ranks} ranks fits "
            "into their memory; use smaller micro-batches, more stages, or recomputation."
        )
    return best


def _rounded(seconds: float) -> float:
    """To three digits: what is as fast as that is told apart by its memory."""
    return float(f"{seconds:.3g}")


def most_in_flight(table: Table) -> int:
    """The most passes whose weight gradients are still to come that a rank has at once."""
    most = 0
    for actions in table:
        now = 0
        for action in actions:
            now += action.kind == "F"
            most = max(most, now)
            now -= action.kind in "BW"
    return most


def time_of(table: Table, num_stages: int, costs: PassCosts) -> float:
    """Seconds until the last rank is done, if each starts what comes next as soon as it can."""
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * len(table)
    for rank, (stage, kind, number) in in_order(table, num_stages):
        start_s = free[rank]
        if kind == "F" and stage:
            start_s = max(start_s, costs.arrives_s(stage - 1, stage, done[stage - 1, "F", number]))
        if kind in "IB" and stage + 1 < num_stages:
            start_s = max(start_s, costs.arrives_s(stage + 1, stage, done[stage + 1, "I", number]))
        parts: Sequence[Kind] = ("I", "W") if kind == "B" else (kind,)
        end_s = start_s + sum(costs.seconds.get((stage, part), 0.0) for part in parts)
        done |= {(stage, part, number): end_s for part in parts}
        free[rank] = end_s
    return max(free)


def _split(table: Table) -> Table:
    """The order with whole backward passes as their halves."""
    return tuple(
        tuple(
            Action(a.stage, kind, a.micro_batch)
            for a in actions
            for kind in (("I", "W") if a.kind == "B" else (a.kind,))
        )
        for actions in table
    )


def _placements(ranks: int, chunks: int) -> Iterator[Sequence[int]]:
    """The rank of each stage: round and round, and of two chunks also back and forth."""
    yield [stage % ranks for stage in range(ranks * chunks)]
    if chunks == 2 and ranks > 1:
        yield [*range(ranks), *reversed(range(ranks))]


@dataclass(frozen=True)
class _Policy:
    """limits: micro-batches in flight, by rank. alternates: forward passes take turns with backward
    ones; else these go first. gap: one of `GAPS`. is_deep: of several forward passes the one of the
    latest stage goes first, else that of the first micro-batch."""

    limits: tuple[int, ...]
    alternates: bool
    gap: float
    is_deep: bool


def _policies(ranks: int, micro_batches: int, chunks: int) -> Iterator[_Policy]:
    """Choices to try, the more promising ones first."""
    most = micro_batches * chunks
    limits: dict[tuple[int, ...], None] = {}
    for factor, more in product((1.0, 1.5, 2.0, 3.0), (0, 1, 2)):
        alike = [math.ceil(factor * ranks * chunks) + more] * ranks
        fewer = [math.ceil(factor * (ranks * chunks - rank)) + more for rank in range(ranks)]
        for found in (alike, fewer):
            limits[tuple(min(most, one) for one in found)] = None
    order = (True, False) if chunks > 1 else (True,)
    for gap, alternates, is_deep, one in product(GAPS, (True, False), order, limits):
        yield _Policy(one, alternates, gap, is_deep)


class _Greedy:
    """Runs all ranks side by side; each takes, when it is free, the best of what it can begin.

    next: by stage and kind the micro-batch that comes next. arrived: when what a pass reads is
    there, by stage, kind and micro-batch. free: when each rank is done with what it runs.
    """

    def __init__(
        self,
        places: Sequence[int],
        ranks: int,
        micro_batches: int,
        costs: PassCosts,
        policy: _Policy,
    ) -> None:
        self.places = places
        self.micro_batches = micro_batches
        self.costs = costs
        self.policy = policy
        self.stages = [[s for s, at in enumerate(places) if at == rank] for rank in range(ranks)]
        self.next: dict[tuple[int, Kind], int] = {}
        self.arrived: dict[tuple[int, Kind, int], float] = {}
        self.free = [0.0] * ranks
        self.in_flight = [0] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.waking: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
        for number in range(micro_batches):
            self.arrived[0, "F", number] = 0.0

    def table(self) -> Table | None:
        """The order; None if the bound on micro-batches in flight lets nobody go on."""
        heapq.heapify(self.waking)
        while self.waking:
            now_s, rank = heapq.heappop(self.waking)
            if now_s < self.free[rank]:
                continue
            action = self._chosen(rank, now_s)
            if action is not None:
                self._run(rank, action, now_s)
        if sum(map(len, self.rows)) < 3 * len(self.places) * self.micro_batches:
            return None
        return tuple(map(tuple, self.rows))

    def _chosen(self, rank: int, now_s: float) -> Action | None:
        forward, inputs = self._ready(rank, "F", now_s), self._ready(rank, "I", now_s)
        if self.in_flight[rank] >= self.policy.limits[rank]:
            forward = []
        turn = bool(self.rows[rank]) and self.rows[rank][-1].kind == "F"
        if inputs and (not forward or turn or not self.policy.alternates):
            return max(inputs, key=lambda action: (-action.micro_batch, action.stage))
        if forward:
            if self.policy.is_deep:
                return max(forward, key=lambda action: action.stage)
            return min(forward, key=lambda action: (action.micro_batch, action.stage))
        weights = self._ready(rank, "W", now_s)
        if not weights:
            return None
        action = min(weights, key=lambda action: (action.micro_batch, -action.stage))
        wait_s = self.policy.gap * self.costs.seconds.get((action.stage, "W"), 0.0)
        return None if self._comes_before(rank, now_s, now_s + wait_s) else action

    def _ready(self, rank: int, kind: Kind, now_s: float) -> list[Action]:
        found: list[Action] = []
        for stage in self.stages[rank]:
            number = self.next.get((stage, kind), 0)
            if self.arrived.get((stage, kind, number), math.inf) <= now_s:
                found.append(Action(stage, kind, number))
        return found

    def _comes_before(self, rank: int, now_s: float, until_s: float) -> bool:
        """Whether something is on its way that is there between two moments, and could begin."""
        kinds: list[Kind] = ["I"]
        if self.in_flight[rank] < self.policy.limits[rank]:
            kinds.append("F")
        return any(
            now_s < self.arrived.get((stage, kind, self.next.get((stage, kind), 0)), 0.0) < until_s
            for stage in self.stages[rank]
            for kind in kinds
        )

    def _run(self, rank: int, action: Action, now_s: float) -> None:
        stage, kind, number = action
        self.rows[rank].append(action)
        self.next[stage, kind] = number + 1
        end_s = self.free[rank] = now_s + self.costs.seconds.get((stage, kind), 0.0)
        self.in_flight[rank] += (kind == "F") - (kind == "W")
        heapq.heappush(self.waking, (end_s, rank))
        last = len(self.places) - 1
        if kind == "F" and stage < last:
            self._arrive(stage + 1, "F", number, self.costs.arrives_s(stage, stage + 1, end_s))
        elif kind == "F":
            self._arrive(stage, "I", number, end_s)
        elif kind == "I":
            self._arrive(stage, "W", number, end_s)
            if stage:
                arrives_s = self.costs.arrives_s(stage, stage - 1, end_s)
                self._arrive(stage - 1, "I", number, arrives_s)

    def _arrive(self, stage: int, kind: Kind, number: int, at_s: float) -> None:
        self.arrived[stage, kind, number] = at_s
        rank = self.places[stage]
        heapq.heappush(self.waking, (max(at_s, self.free[rank]), rank))
