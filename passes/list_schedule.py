"""List scheduling of a whole step on the cost model.

The step is a graph of compute ops and communications. Time advances on one compute stream and
one stream per group of communication; whenever the compute stream is free it takes, of the ops
whose inputs have arrived, the one of highest priority, and a communication is started as soon
as what it sends is there. Nothing is known of models, layers or passes: one sub-batch's
backward runs beside another's forward where that hides more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dist import STARTED, DistOp, WaitOp
from shardweave.ir.regions import storage_of
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.planners.cost import CostModel

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


def list_schedule(graph: Graph, priority: Priority, memory_cap: int | None = None) -> list[Operation]:
    """The order of all ops, waits included. O((V + E) log V).

    With `memory_cap` (bytes of values made by the step and alive at once) an op that would
    exceed it yields to ready ops that do not, while there are any.
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
        self.memory = _Live(memory_cap)

    def run(self) -> list[Operation]:
        for i, count in enumerate(self.waiting):
            if count == 0:
                self._push(i)
        while self.ready or self.starts or self.arrivals:
            self._deliver()
            if self.starts:
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
        aside: list[tuple[tuple[float, ...], int]] = []
        chosen: int | None = None
        while self.ready and len(aside) < 64:
            entry = heapq.heappop(self.ready)
            if self.memory.fits(self.graph.ops[entry[1]]):
                chosen = entry[1]
                break
            aside.append(entry)
        if chosen is None:
            best = min(aside, key=lambda entry: self.memory.growth(self.graph.ops[entry[1]]))
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
        self.memory.run(op)

    def _wait(self, i: int) -> None:
        wait = self.graph.waits[i]
        if wait is not None and i not in self.waited:
            self.waited.add(i)
            self.order.append(wait)


class _Live:
    """Bytes alive while ops run in some order."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.alive = 0
        self.readers: dict[SSAValue, int] = {}

    def growth(self, op: Operation) -> int:
        """Bytes that running an op adds, less those that it frees."""
        added = sum(_size(result) for result in op.results if storage_of(result) is result)
        freed = 0
        for root in {_root(v) for v in op.operands}:
            if self.readers.get(root) == 1:
                freed += _size(root)
        return added - freed

    def fits(self, op: Operation) -> bool:
        return self.cap is None or self.alive + max(self.growth(op), 0) <= self.cap

    def run(self, op: Operation) -> None:
        if self.cap is None:
            return
        for root in {_root(v) for v in op.operands}:
            if root in self.readers:
                self.readers[root] -= 1
                if self.readers[root] == 0:
                    self.alive -= _size(root)
                    del self.readers[root]
        for result in op.results:
            if storage_of(result) is result:
                self.alive += _size(result)
                self.readers[result] = _num_readers(result)


def _size(value: SSAValue) -> int:
    return num_bytes(tensor_type_of(value))


def _root(value: SSAValue) -> SSAValue:
    """The value that holds the memory: through views, and through waits to what was started."""
    value = storage_of(value)
    while isinstance(value.owner, WaitOp):
        owner = value.owner
        value = owner.operands[owner.results.index(value)]
    return value


def _num_readers(value: SSAValue) -> int:
    """Distinct ops that read a value's memory, through views and waits."""
    readers: set[Operation] = set()
    stack = [value]
    while stack:
        for use in stack.pop().uses:
            user = use.operation
            if isinstance(user, WaitOp):
                stack.append(user.results[use.index])
            elif storage_of(user.results[0]) is not user.results[0] if user.results else False:
                stack.append(user.results[0])
                readers.add(user)
            else:
                readers.add(user)
    return len(readers)
