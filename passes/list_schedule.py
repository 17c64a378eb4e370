"""List scheduling of a whole step on the cost model.

The step is a graph of compute ops and communications. Time advances on one compute stream and
one stream per group of communication; whenever the compute stream is free it takes, of the ops
whose inputs have arrived, the one of highest priority, and a communication is started as soon
as what it sends is there. Nothing is known of models, layers or passes: one sub-batch's
backward runs beside another's forward where that hides more. Since an op runs as soon as it can,
values live long; a `Window` keeps the order near another one, and so its memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dist import STARTED, DistOp, WaitOp
from shardweave.planners.cost import CostModel

Priority = Callable[[int], tuple[float, ...]]
"""Of the index of an op; higher goes first."""


@dataclass
class Graph:
    """The ops of a step (waits folded into their starts) with times and dependences.

    ops: in program order. waits: for a start its wait. compute_s: on the compute stream (of a
    start, what starting takes). travel_s: from a start to its arrival. tail_s: longest path from
    the op's beginning to the end.
    """

    ops: list[Operation]
    waits: list[Operation | None]
    compute_s: list[float]
    travel_s: list[float]
    streams: list[tuple[str, ...] | None]
    successors: list[list[int]]
    num_producers: list[int]
    tail_s: list[float] = field(default_factory=list[float])


def build_graph(ops: Sequence[Operation], cost: CostModel) -> Graph:
    """Dependences and times. Linear in ops and uses."""
    kept = [op for op in ops if not isinstance(op, WaitOp)]
    index = {op: i for i, op in enumerate(kept)}
    graph = Graph(kept, [None] * len(kept), [], [], [], [[] for _ in kept], [0] * len(kept))
    for i, op in enumerate(kept):
        if isinstance(op, STARTED):
            assert isinstance(op, DistOp)
            graph.waits[i] = next(use.operation for r in op.results for use in r.uses)
            graph.travel_s.append(cost.collective_time_s(op))
            graph.streams.append(cost.stream_of(op))
        else:
            graph.travel_s.append(0.0)
            graph.streams.append(None)
        graph.compute_s.append(cost.op_time_s(op))
        producers = {index[p] for p in map(_producer, op.operands) if p is not None}
        graph.num_producers[i] = len(producers)
        for producer in producers:
            graph.successors[producer].append(i)
    graph.tail_s = [0.0] * len(kept)
    for i in reversed(range(len(kept))):
        longest = max((graph.tail_s[s] for s in graph.successors[i]), default=0.0)
        graph.tail_s[i] = graph.compute_s[i] + graph.travel_s[i] + longest
    return graph


def _producer(value: SSAValue) -> Operation | None:
    """The op that computes or communicates a value; a wait stands for its start."""
    owner = value.owner
    if isinstance(owner, WaitOp):
        owner = owner.operands[0].owner
    return owner if isinstance(owner, Operation) else None


@dataclass(frozen=True)
class Window:
    """How far ahead of another order a schedule may run, which bounds the memory it needs more.

    position: of each op of the graph, in that order. size: an op may run once fewer than `size`
    ops before it are left.
    """

    position: Sequence[int]
    size: int


def list_schedule(
    graph: Graph, priority: Priority, window: Window | None = None
) -> list[Operation]:
    """The order of all ops, waits included. O((V + E) log V)."""
    return _Scheduler(graph, priority, window).run()


class _Scheduler:
    def __init__(self, graph: Graph, priority: Priority, window: Window | None) -> None:
        self.graph = graph
        self.priority = priority
        self.now = 0.0
        self.waiting = list(graph.num_producers)
        self.ready: list[tuple[tuple[float, ...], int]] = []
        self.starts: list[tuple[tuple[float, ...], int]] = []
        self.arrivals: list[tuple[float, int]] = []
        self.stream_free: dict[tuple[str, ...], float] = {}
        self.order: list[Operation] = []
        self.waited: set[int] = set()
        self.numbers = {op: i for i, op in enumerate(graph.ops)}
        self.frontier = None if window is None else _Frontier(window)

    def run(self) -> list[Operation]:
        for i, count in enumerate(self.waiting):
            if count == 0:
                self._push(i)
        while self.ready or self.starts or self.arrivals:
            self._deliver()
            if self.starts:
                self._start(heapq.heappop(self.starts)[1])
            elif self.ready:
                self._compute(heapq.heappop(self.ready)[1])
            elif self.arrivals:
                self.now = max(self.now, self.arrivals[0][0])
        for i in range(len(self.graph.ops)):
            self._wait(i)
        return self.order

    def _push(self, i: int) -> None:
        if self.frontier is not None and not self.frontier.admits(i):
            return
        key = tuple(-part for part in self.priority(i))
        heapq.heappush(self.ready if self.graph.streams[i] is None else self.starts, (key, i))

    def _deliver(self) -> None:
        """Communications that have arrived release their readers."""
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self._release(heapq.heappop(self.arrivals)[1])

    def _release(self, i: int) -> None:
        for successor in self.graph.successors[i]:
            self.waiting[successor] -= 1
            if self.waiting[successor] == 0:
                self._push(successor)

    def _start(self, i: int) -> None:
        stream = self.graph.streams[i]
        assert stream is not None
        self._append(i)
        self.now += self.graph.compute_s[i]
        finish = max(self.now, self.stream_free.get(stream, 0.0)) + self.graph.travel_s[i]
        self.stream_free[stream] = finish
        heapq.heappush(self.arrivals, (finish, i))

    def _compute(self, i: int) -> None:
        self._append(i)
        self.now += self.graph.compute_s[i]
        self._release(i)

    def _append(self, i: int) -> None:
        op = self.graph.ops[i]
        for value in op.operands:
            if isinstance(value.owner, WaitOp):
                producer = _producer(value)
                assert producer is not None
                self._wait(self.numbers[producer])
        self.order.append(op)
        if self.frontier is not None:
            for admitted in self.frontier.advance(i):
                self._push(admitted)

    def _wait(self, i: int) -> None:
        wait = self.graph.waits[i]
        if wait is not None and i not in self.waited:
            self.waited.add(i)
            self.order.append(wait)


class _Frontier:
    """The first op of a window's order that has not run, and ready ops too far ahead of it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.first = 0
        self.has_run = [False] * len(window.position)
        self.held: list[tuple[int, int]] = []

    def admits(self, i: int) -> bool:
        """Whether a ready op may run now; if not, `advance` gives it later."""
        position = self.window.position[i]
        if position <= self.first + self.window.size:
            return True
        heapq.heappush(self.held, (position, i))
        return False

    def advance(self, i: int) -> list[int]:
        """Note that an op runs; returns the ready ops that may run now."""
        self.has_run[self.window.position[i]] = True
        while self.first < len(self.has_run) and self.has_run[self.first]:
            self.first += 1
        found: list[int] = []
        while self.held and self.held[0][0] <= self.first + self.window.size:
            found.append(heapq.heappop(self.held)[1])
        return found
