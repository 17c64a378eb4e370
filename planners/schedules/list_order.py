"""Schedule `list`: list scheduling of all stages' passes by seconds, with B split into I and W.

Micro-batches in flight are bounded, as in the heuristic of Qi et al. 2024 (Sec. 3.1): input
gradients (I) go first, forward passes run as far ahead as memory allows, and weight gradients (W)
fill the gaps. Several bounds and policies are tried, and the other schedules' orders are among the
candidates, so that the result is never slower than they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from shardweave.planners.schedules.table import Action, Kind, Table, actions_in_order, needs_of

GAPS = (0.0, 0.5, 1.0)
"""Policies of waiting: a rank puts off a weight gradient if another pass becomes ready within this
share of the weight gradient's own time."""

MOST_PASSES = 60_000
"""Most passes to order in all attempts together; this many take about a second."""

StageAt = tuple[int, int]
"""(Stage, rank that holds it)."""


@dataclass(frozen=True)
class PassCosts:
    """Costs of a pipeline's passes, for stages at ranks (`StageAt`). pass_s: seconds of a pass of
    kind `F` (forward), `I` (input gradients) or `W` (weight gradients). message_s: seconds of a
    message from one stage and rank to another."""

    pass_s: Callable[[StageAt, Kind], float]
    message_s: Callable[[StageAt, StageAt], float] = lambda source, goal: 0.0


UNIT_COSTS = PassCosts(lambda stage_at, kind: 1.0)
"""One second for each pass, and no time for messages."""

Placement = Sequence[Sequence[int]]
"""Rank that runs a micro-batch, by stage and micro-batch."""

Fits = Callable[[Table], bool]
"""True if an order fits into the memory of all ranks."""


def list_table(
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    costs: PassCosts | None = None,
    others: Sequence[Table] = (),
    fits: Fits | None = None,
    placement: Placement | None = None,
) -> Table:
    """Search for the fastest order that fits; its backward passes are split into I and W.

    others: orders to compare with. fits: whether an order fits; default: fewer than twice as many
    micro-batches in flight as on the first rank in 1F1B, as in ZB-H2. placement: for stages at
    several ranks; None: each stage is at one rank, and several assignments are tried. Raises
    ValueError if no order fits.
    """
    seconds = costs or UNIT_COSTS
    candidates = [_split(table) for table in others]
    placements = [placement] if placement else [*_placements(ranks, micro_batches, chunks)]
    num_stages = len(placements[0])
    most = max(1, MOST_PASSES // (3 * num_stages * micro_batches))
    attempts = product(_policies(ranks, micro_batches, chunks), placements)
    for policy, places in islice(attempts, most):
        table = _Greedy(places, ranks, seconds, policy).table()
        if table is not None:
            candidates.append(table)
    ranked = {
        table: (_rounded(time_of(table, num_stages, seconds)), most_weight_passes_in_flight(table))
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
    """Round to three digits; orders of nearly equal time then tie, and memory decides."""
    return float(f"{seconds:.3g}")


def most_weight_passes_in_flight(table: Table) -> int:
    """Largest number of forward passes on a rank whose weight gradients are still missing."""
    most = 0
    for actions in table:
        now = 0
        for action in actions:
            now += action.kind == "F"
            most = max(most, now)
            now -= action.kind in "BW"
    return most


def time_of(table: Table, num_stages: int, costs: PassCosts) -> float:
    """Seconds until the last rank is done, if each rank begins every pass as early as it can."""
    return max(end_s for *_, end_s in times_of(table, num_stages, costs))


def times_of(
    table: Table, num_stages: int, costs: PassCosts
) -> Iterator[tuple[int, Action, float, float]]:
    """Yield (rank, action, start, end in seconds) of all passes, if each rank begins every pass as
    early as it can. Raises ValueError for a deadlock."""
    done: dict[tuple[int, str, int], tuple[int, float]] = {}
    free = [0.0] * len(table)
    for rank, action in actions_in_order(table, num_stages):
        stage, kind, number = action
        start_s = free[rank]
        for source, what, _ in needs_of(action, num_stages):
            at, end_s = done[source, what, number]
            message_s = costs.message_s((source, at), (stage, rank)) if source != stage else 0.0
            start_s = max(start_s, end_s + message_s)
        parts: Sequence[Kind] = ("I", "W") if kind == "B" else (kind,)
        end_s = start_s + sum(costs.pass_s((stage, rank), part) for part in parts)
        done |= {(stage, part, number): (rank, end_s) for part in parts}
        free[rank] = end_s
        yield rank, action, start_s, end_s


def _split(table: Table) -> Table:
    """Replace each backward pass B of a table by its halves I and W."""
    return tuple(
        tuple(
            Action(a.stage, kind, a.micro_batch)
            for a in actions
            for kind in (("I", "W") if a.kind == "B" else (a.kind,))
        )
        for actions in table
    )


def _placements(ranks: int, micro_batches: int, chunks: int) -> Iterator[Placement]:
    """Yield placements with each stage at one rank: cyclic and, with two chunks, also as a V."""
    yield [[stage % ranks] * micro_batches for stage in range(ranks * chunks)]
    if chunks == 2 and ranks > 1:
        yield [[rank] * micro_batches for rank in (*range(ranks), *reversed(range(ranks)))]


@dataclass(frozen=True)
class _Policy:
    """Choices of the greedy scheduler. limits: most micro-batches in flight, by rank. alternates:
    forward and backward passes take turns; else backward goes first. gap: one of `GAPS`. is_deep:
    the forward pass of the latest stage goes first; else that of the first micro-batch."""

    limits: tuple[int, ...]
    alternates: bool
    gap: float
    is_deep: bool


def _policies(ranks: int, micro_batches: int, chunks: int) -> Iterator[_Policy]:
    """Yield the policies to try, the more promising ones first."""
    most = micro_batches * chunks
    limits: dict[tuple[int, ...], None] = {}
    for factor, more in product((1.0, 1.5, 2.0, 3.0), (0, 1, 2)):
        alike = [math.ceil(factor * ranks * chunks) + more] * ranks
        fewer = [math.ceil(factor * (ranks * chunks - rank)) + more for rank in range(ranks)]
        for most_each in (alike, fewer):
            limits[tuple(min(most, count) for count in most_each)] = None
    order = (True, False) if chunks > 1 else (True,)
    for gap, alternates, is_deep, limit in product(GAPS, (True, False), order, limits):
        yield _Policy(limit, alternates, gap, is_deep)


class _Greedy:
    """Simulates all ranks together; each free rank begins the best pass that is ready.

    left: by (stage, rank, kind), the micro-batches still to run, the next one last. arrived: by
    (stage, kind, micro-batch), the time when a pass has its operands. free: by rank, the time when
    its current pass ends.
    """

    def __init__(self, places: Placement, ranks: int, costs: PassCosts, policy: _Policy) -> None:
        self.places = places
        self.micro_batches = micro_batches = len(places[0])
        self.costs = costs
        self.policy = policy
        self.stages = [[s for s, at in enumerate(places) if rank in at] for rank in range(ranks)]
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        self.left: dict[tuple[int, int, Kind], list[int]] = {
            (stage, rank, kind): [n for n in reversed(range(micro_batches)) if at[n] == rank]
            for stage, at in enumerate(places)
            for rank in set(at)
            for kind in kinds
        }
        self.arrived: dict[tuple[int, Kind, int], float] = {}
        self.free = [0.0] * ranks
        self.in_flight = [0] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.waking: list[tuple[float, int]] = [(0.0, rank) for rank in range(ranks)]
        for number in range(micro_batches):
            self.arrived[0, "F", number] = 0.0

    def table(self) -> Table | None:
        """Return the order; None if the bound on micro-batches in flight causes a deadlock."""
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
        wait_s = self.policy.gap * self.costs.pass_s((action.stage, rank), "W")
        return None if self._comes_before(rank, now_s, now_s + wait_s) else action

    def _ready(self, rank: int, kind: Kind, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for stage in self.stages[rank]:
            left = self.left[stage, rank, kind]
            if left and self.arrived.get((stage, kind, left[-1]), math.inf) <= now_s:
                actions.append(Action(stage, kind, left[-1]))
        return actions

    def _comes_before(self, rank: int, now_s: float, until_s: float) -> bool:
        """True if a pass F or I that the rank may run becomes ready between the two times."""
        kinds: list[Kind] = ["I"]
        if self.in_flight[rank] < self.policy.limits[rank]:
            kinds.append("F")
        return any(
            now_s < self.arrived.get((stage, kind, self.left[stage, rank, kind][-1]), 0.0) < until_s
            for stage in self.stages[rank]
            for kind in kinds
            if self.left[stage, rank, kind]
        )

    def _run(self, rank: int, action: Action, now_s: float) -> None:
        stage, kind, number = action
        self.rows[rank].append(action)
        self.left[stage, rank, kind].pop()
        end_s = self.free[rank] = now_s + self.costs.pass_s((stage, rank), kind)
        self.in_flight[rank] += (kind == "F") - (kind == "W")
        heapq.heappush(self.waking, (end_s, rank))
        last = len(self.places) - 1
        if kind == "F" and stage < last:
            self._arrive(rank, stage, Action(stage + 1, "F", number), end_s)
        elif kind == "F":
            self._arrive(rank, stage, Action(stage, "I", number), end_s)
        elif kind == "I":
            self._arrive(rank, stage, Action(stage, "W", number), end_s)
            if stage:
                self._arrive(rank, stage, Action(stage - 1, "I", number), end_s)

    def _arrive(self, source: int, stage: int, goal: Action, end_s: float) -> None:
        """Record when pass `goal` gets its operand, made by rank `source` in `stage` at `end_s`."""
        rank = self.places[goal.stage][goal.micro_batch]
        if goal.stage != stage:
            end_s += self.costs.message_s((stage, source), (goal.stage, rank))
        self.arrived[goal.stage, goal.kind, goal.micro_batch] = end_s
        heapq.heappush(self.waking, (max(end_s, self.free[rank]), rank))
