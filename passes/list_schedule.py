"""List scheduling of a whole step on the cost model.

The step is a graph of compute ops and communications. Time advances on one compute stream and
one stream per group of communication; whenever the compute stream is free it takes, of the ops
whose inputs have arrived, the one of highest priority, and a communication is started as soon
as what it sends is there. Nothing is known of models, layers or passes: one sub-batch's
backward runs beside another's forward where that hides more.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dist import STARTED, AllReduceOp, DistOp, WaitOp
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.planners.cost import CostModel, kind_of

_LOOK_AHEAD = 64
"""Ready ops that are looked at for one that fits the memory."""

Priority = Callable[[int], tuple[float, ...]]
"""Of the index of an op; higher goes first."""


@dataclass
class Graph:
    """The ops of a step (waits folded into their starts) with times and dependences.

    ops: in program order. waits: for a start its wait. time_s: of the compute stream, or of
    the communication for a start. tail_s: longest path from the op's beginning to the end.
    """

    ops: list[Operation]
    waits: list[Operation | None]
    time_s: list[float]
    streams: list[tuple[str, ...] | None]
    successors: list[list[int]]
    num_producers: list[int]
    tail_s: list[float] = field(default_factory=list[float])


def build_graph(ops: Sequence[Operation], cost: CostModel) -> Graph:
    """Dependences and times. Linear in ops and uses."""
    kept = [op for op in ops if not isinstance(op, WaitOp)]
    index = {op: i for i, op in enumerate(kept)}
    graph = Graph(kept, [None] * len(kept), [], [], [[] for _ in kept], [0] * len(kept))
    for i, op in enumerate(kept):
        if isinstance(op, STARTED):
            assert isinstance(op, DistOp)
            graph.waits[i] = next(use.operation for r in op.results for use in r.uses)
            graph.time_s.append(cost.collective_time_s(op))
            graph.streams.append(cost.stream_of(op))
        else:
            graph.time_s.append(cost.op_time_s(op))
            graph.streams.append(None)
        producers = {index[p] for p in map(_producer, op.operands) if p is not None}
        graph.num_producers[i] = len(producers)
        for producer in producers:
            graph.successors[producer].append(i)
    graph.tail_s = [0.0] * len(kept)
    for i in reversed(range(len(kept))):
        longest = max((graph.tail_s[s] for s in graph.successors[i]), default=0.0)
        graph.tail_s[i] = graph.time_s[i] + longest
    return graph


def _producer(value: SSAValue) -> Operation | None:
    """The op that computes or communicates a value; a wait stands for its start."""
    owner = value.owner
    if isinstance(owner, WaitOp):
        owner = owner.operands[0].owner
    return owner if isinstance(owner, Operation) else None


def list_schedule(
    graph: Graph, priority: Priority, memory_cap: int | None = None
) -> list[Operation]:
    """The order of all ops, waits included. O((V + E) log V).

    With `memory_cap` (bytes of values made by the step and alive at once, as
    `planners.memory` counts them) an op or a start that would exceed it yields to those that do
    not, while there are any.
    """
    return _Scheduler(graph, priority, memory_cap).run()


class _Scheduler:
    def __init__(self, graph: Graph, priority: Priority, memory_cap: int | None) -> None:
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
        self.memory = None if memory_cap is None else _Live(graph, memory_cap)

    def run(self) -> list[Operation]:
        for i, count in enumerate(self.waiting):
            if count == 0:
                self._push(i)
        while self.ready or self.starts or self.arrivals:
            self._deliver()
            if self.starts and self._may_start(self.starts[0][1]):
                self._start(heapq.heappop(self.starts)[1])
            elif self.ready:
                self._compute(self._pick())
            elif self.arrivals:
                self.now = max(self.now, self.arrivals[0][0])
        for i in range(len(self.graph.ops)):
            self._wait(i)
        return self.order

    def _push(self, i: int) -> None:
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

    def _may_start(self, i: int) -> bool:
        """Whether a communication fits the memory, or nothing else could make room for it."""
        if self.memory is None or self.memory.fits(i):
            return True
        return not self.ready and not self.arrivals

    def _start(self, i: int) -> None:
        stream = self.graph.streams[i]
        assert stream is not None
        self._append(i)
        finish = max(self.now, self.stream_free.get(stream, 0.0)) + self.graph.time_s[i]
        self.stream_free[stream] = finish
        heapq.heappush(self.arrivals, (finish, i))

    def _compute(self, i: int) -> None:
        self._append(i)
        self.now += self.graph.time_s[i]
        self._release(i)

    def _pick(self) -> int:
        """The ready op of highest priority that fits the memory, else the one that adds least."""
        memory = self.memory
        if memory is None:
            return heapq.heappop(self.ready)[1]
        aside: list[tuple[tuple[float, ...], int]] = []
        chosen: int | None = None
        while self.ready and len(aside) < _LOOK_AHEAD:
            entry = heapq.heappop(self.ready)
            if memory.fits(entry[1]):
                chosen = entry[1]
                break
            aside.append(entry)
        if chosen is None:
            best = min(aside, key=lambda entry: memory.growth(entry[1]))
            aside.remove(best)
            chosen = best[1]
        for entry in aside:
            heapq.heappush(self.ready, entry)
        return chosen

    def _append(self, i: int) -> None:
        op = self.graph.ops[i]
        for value in op.operands:
            if isinstance(value.owner, WaitOp):
                producer = _producer(value)
                assert producer is not None
                self._wait(self.numbers[producer])
        self.order.append(op)
        if self.memory is not None:
            self.memory.run(i)

    def _wait(self, i: int) -> None:
        wait = self.graph.waits[i]
        if wait is not None and i not in self.waited:
            self.waited.add(i)
            self.order.append(wait)
            if self.memory is not None:
                self.memory.arrive(i)


class _Live:
    """Bytes of the step's own values that are alive while ops run in some order."""

    def __init__(self, graph: Graph, cap: int) -> None:
        self.cap = cap
        self.alive = 0
        self.made: list[list[SSAValue]] = []
        self.read: list[list[SSAValue]] = []
        self.readers: Counter[SSAValue] = Counter()
        self.is_held: list[bool] = []
        roots: dict[SSAValue, SSAValue | None] = {}
        for op, wait in zip(graph.ops, graph.waits, strict=True):
            made = _define(op, wait, roots)
            read = list({root for v in op.operands if (root := roots.get(v)) is not None})
            # An all-reduce works on a copy; other collectives read their operand till they arrive.
            is_held = wait is not None and not isinstance(op, AllReduceOp)
            self.made.append(made)
            self.read.append(read)
            self.is_held.append(is_held)
            for root in read:
                self.readers[root] += 1 + is_held
        for value, root in roots.items():
            if root is not None and any(isinstance(use.operation, ReturnOp) for use in value.uses):
                self.readers[root] += 1

    def growth(self, i: int) -> int:
        """Bytes that running an op adds, less those that it frees."""
        freed = sum(_size(root) for root in self.read[i] if self.readers[root] == 1)
        return sum(_size(root) for root in self.made[i] if self.readers[root]) - freed

    def fits(self, i: int) -> bool:
        return self.alive + sum(map(_size, self.made[i])) <= self.cap

    def run(self, i: int) -> None:
        self.alive += sum(_size(root) for root in self.made[i] if self.readers[root])
        self._free(self.read[i])

    def arrive(self, i: int) -> None:
        """The communication that op `i` started is over."""
        if self.is_held[i]:
            self._free(self.read[i])

    def _free(self, roots: Sequence[SSAValue]) -> None:
        for root in roots:
            self.readers[root] -= 1
            if self.readers[root] == 0:
                self.alive -= _size(root)


def _define(
    op: Operation, wait: Operation | None, roots: dict[SSAValue, SSAValue | None]
) -> list[SSAValue]:
    """Note whose memory the results of an op (and its wait) share; returns those with their own.

    The memory of arguments is not the step's: None.
    """
    shared = roots.get(op.operands[0]) if kind_of(op) == "view" else None
    for result in op.results:
        roots[result] = shared if kind_of(op) == "view" else result
    if wait is not None:
        for started, arrived in zip(wait.operands, wait.results, strict=True):
            roots[arrived] = roots[started]
    return [] if kind_of(op) == "view" else list(op.results)


def _size(value: SSAValue) -> int:
    return num_bytes(tensor_type_of(value))
