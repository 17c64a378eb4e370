"""List scheduling of a whole step, with times from the cost model.

The step is a graph of compute ops and communications. Time advances on one compute stream and one
stream per group of communication. Whenever the compute stream is free, it runs the op of highest
priority whose operands have arrived; a communication starts as soon as its operand exists.
Scheduling ignores models, layers and passes: one sub-batch's backward runs beside another's forward
where that hides more.

Running ops as early as possible lets values live long, above all recomputed ones. A `MemoryBudget`
admits an op only while the live bytes stay under a cap, and `recompute_gates` lets recomputation
run at most a few communications before its position in the program.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import Copy, copy_of, phase_of
from shardweave.ir.dialects.dist import WaitOp
from shardweave.ir.program.program import Program
from shardweave.planners.cost.memory import held_by, storages_of
from shardweave.planners.overlap.graph import Graph, producer_of


@dataclass(frozen=True)
class Liveness:
    """Memory that the ops of a graph hold, for any order of the ops.

    base_bytes: of arguments, which are always live. created_bytes: by op, bytes of its results.
    reads: by op, the indices of values that it reads or creates and that die after their last
    reader. size_bytes, num_readers: by value.
    """

    base_bytes: int
    created_bytes: Sequence[int]
    reads: Sequence[Sequence[int]]
    size_bytes: Sequence[int]
    num_readers: Sequence[int]


def liveness(program: Program, graph: Graph) -> Liveness:
    """Compute the `Liveness` of a program with the ops of `graph`; a wait counts as its start."""
    index = {op: i for i, op in enumerate(graph.ops)}
    storages, created = storages_of(program)
    created_bytes = [0] * len(graph.ops)
    reads: list[set[int]] = [set() for _ in graph.ops]
    sizes: list[int] = []
    numbers: dict[int, int] = {}  # by the identity of a storage
    for op, made in zip(program.ops, created, strict=True):
        i = index[_starter(op)]
        for storage in made:
            created_bytes[i] += storage.size
            numbers[id(storage)] = len(sizes)
            sizes.append(storage.size)
        held = [*held_by(op), *op.results]
        reads[i].update(numbers[id(s)] for v in held if id(s := storages[v]) in numbers)
    forever = {numbers.get(id(storages[slot.value])) for slot in program.results}
    readers = Counter(number for own in reads for number in own)
    return Liveness(
        base_bytes=sum(storages[value].size for value in program.function.body.block.args),
        created_bytes=created_bytes,
        reads=[sorted(own - forever) for own in reads],
        size_bytes=sizes,
        num_readers=[readers[number] for number in range(len(sizes))],
    )


def _starter(op: Operation) -> Operation:
    owner = op.operands[0].owner if isinstance(op, WaitOp) else op
    assert isinstance(owner, Operation)
    return owner


class MemoryBudget:
    """Bytes live after the ops run so far, and the cap that they should not exceed."""

    def __init__(self, live: Liveness, cap_bytes: int) -> None:
        self.live = live
        self.cap_bytes = cap_bytes
        self.bytes = live.base_bytes
        self.left = list(live.num_readers)

    def admits(self, i: int) -> bool:
        """True if an op fits under the cap, or frees at least as many bytes as it allocates."""
        created = self.live.created_bytes[i]
        if self.bytes + created <= self.cap_bytes:
            return True
        dying = (self.live.size_bytes[n] for n in self.live.reads[i] if self.left[n] == 1)
        return created <= sum(dying)

    def run(self, i: int) -> None:
        """Update the live bytes for an op that runs."""
        self.bytes += self.live.created_bytes[i]
        for number in self.live.reads[i]:
            self.left[number] -= 1
            if self.left[number] == 0:
                self.bytes -= self.live.size_bytes[number]


def recompute_gates(graph: Graph, ahead: int) -> Mapping[int, Sequence[int]]:
    """Map an op (the gate) to the recomputed ops that may run only after the gate was issued.

    In program order a recomputed op stands right before its backward ops. It may run up to `ahead`
    communications of its sub-batch's backward pass earlier (Oases' Algorithm 2: one), and never
    before that pass begins.
    """
    starts: dict[Copy | None, list[int]] = {}
    first: dict[Copy | None, int] = {}
    gates: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        thread, phase = copy_of(op), phase_of(op)
        if phase == "backward":
            first.setdefault(thread, i)
            if graph.streams[i] is not None:
                starts.setdefault(thread, []).append(i)
        elif phase == "recompute":
            before = starts.get(thread, [])
            gate = before[-ahead] if len(before) >= ahead else first.get(thread)
            if gate is not None:
                gates.setdefault(gate, []).append(i)
    return gates


Priority = Callable[[int], tuple[float, ...]]
"""Priority of an op, by its index; higher goes first."""

NO_GATES: Mapping[int, Sequence[int]] = {}

MOST_SET_ASIDE = 64
"""Most ops over the memory budget to skip in search of one within it."""


def list_schedule(
    graph: Graph,
    priority: Priority,
    budget: MemoryBudget | None = None,
    gates: Mapping[int, Sequence[int]] = NO_GATES,
) -> list[Operation]:
    """Order all ops, with their waits, by list scheduling. Takes O((V + E) log V) time.

    budget: an op that it does not admit waits until others have freed memory; if no op can run, the
    first in program order runs anyway, so that the order may exceed the cap. gates: by op, further
    ops that must not run before it was issued.
    """
    return _Scheduler(graph, priority, budget, gates).run()


class _Scheduler:
    def __init__(
        self,
        graph: Graph,
        priority: Priority,
        budget: MemoryBudget | None,
        gates: Mapping[int, Sequence[int]],
    ) -> None:
        self.graph = graph
        self.priority = priority
        self.budget = budget
        self.gates = gates
        self.now = 0.0
        self.waiting = list(graph.num_producers)
        for gated in gates.values():
            for i in gated:
                self.waiting[i] += 1
        self.ready: list[tuple[tuple[float, ...], int]] = []
        self.starts: list[tuple[tuple[float, ...], int]] = []
        self.arrivals: list[tuple[float, int]] = []
        self.stream_free: dict[tuple[str, ...], float] = {}
        self.order: list[Operation] = []
        self.waited: set[int] = set()
        self.numbers = {op: i for i, op in enumerate(graph.ops)}

    def run(self) -> list[Operation]:
        for i, count in enumerate(self.waiting):
            if count == 0:
                self._push(i)
        while self.ready or self.starts or self.arrivals:
            self._deliver()
            i = self._pick(self.starts)
            if i is None:
                i = self._pick(self.ready)
            if i is not None:
                self._issue(i)
            elif self.arrivals:
                self.now = max(self.now, self.arrivals[0][0])
            elif self.ready or self.starts:
                self._issue(self._over_budget())
        for i in range(len(self.graph.ops)):
            self._wait(i)
        return self.order

    def _push(self, i: int) -> None:
        key = tuple(-part for part in self.priority(i))
        heapq.heappush(self.ready if self.graph.streams[i] is None else self.starts, (key, i))

    def _pick(self, heap: list[tuple[tuple[float, ...], int]]) -> int | None:
        """Take the op of highest priority that the budget admits."""
        aside: list[tuple[tuple[float, ...], int]] = []
        picked: int | None = None
        while heap and picked is None and len(aside) < MOST_SET_ASIDE:
            entry = heapq.heappop(heap)
            if self.budget is None or self.budget.admits(entry[1]):
                picked = entry[1]
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(heap, entry)
        return picked

    def _over_budget(self) -> int:
        """Take the first ready op in program order, although the budget does not admit it."""
        entry = min((*self.ready, *self.starts), key=lambda e: e[1])
        heap = self.ready if self.graph.streams[entry[1]] is None else self.starts
        heap.remove(entry)
        heapq.heapify(heap)
        return entry[1]

    def _deliver(self) -> None:
        """Make ops ready whose communications have arrived."""
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self._release(self.graph.successors[heapq.heappop(self.arrivals)[1]])

    def _release(self, waiting: Sequence[int]) -> None:
        for i in waiting:
            self.waiting[i] -= 1
            if self.waiting[i] == 0:
                self._push(i)

    def _issue(self, i: int) -> None:
        self._append(i)
        self.now += self.graph.compute_s[i]
        stream = self.graph.streams[i]
        if stream is None:
            self._release(self.graph.successors[i])
        else:
            finish = max(self.now, self.stream_free.get(stream, 0.0)) + self.graph.travel_s[i]
            self.stream_free[stream] = finish
            heapq.heappush(self.arrivals, (finish, i))
        self._release(self.gates.get(i, ()))

    def _append(self, i: int) -> None:
        op = self.graph.ops[i]
        for value in op.operands:
            if isinstance(value.owner, WaitOp):
                producer = producer_of(value)
                assert producer is not None
                self._wait(self.numbers[producer])
        self.order.append(op)
        if self.budget is not None:
            self.budget.run(i)

    def _wait(self, i: int) -> None:
        wait = self.graph.waits[i]
        if wait is not None and i not in self.waited:
            self.waited.add(i)
            self.order.append(wait)
