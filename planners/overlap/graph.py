"""The dependence graph of a step's ops, with their times, for list scheduling."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.dist import StartedOp, WaitOp
from shardweave.planners.cost.model import CostModel


@dataclass
class Graph:
    """The ops of a step (a wait is part of its start) with their times and dependences.

    All lists are by op, in program order. waits: a start's wait. compute_s: seconds on the compute
    stream (for a start, the seconds to start it). travel_s: seconds from a start to its arrival.
    tail_s: longest path from the op's beginning to the end of the step.
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
    """Build the graph of started ops. Takes time linear in ops and uses."""
    kept = [op for op in ops if not isinstance(op, WaitOp)]
    index = {op: i for i, op in enumerate(kept)}
    graph = Graph(kept, [None] * len(kept), [], [], [], [[] for _ in kept], [0] * len(kept))
    for i, op in enumerate(kept):
        if isinstance(op, StartedOp):
            graph.waits[i] = wait_of(op)
            graph.travel_s.append(cost.collective_time_s(op))
            graph.streams.append(cost.stream_of(op))
        else:
            graph.travel_s.append(0.0)
            graph.streams.append(None)
        graph.compute_s.append(cost.op_time_s(op))
        producers = {index[p] for p in map(producer_of, op.operands) if p is not None}
        graph.num_producers[i] = len(producers)
        for producer in producers:
            graph.successors[producer].append(i)
    graph.tail_s = [0.0] * len(kept)
    for i in reversed(range(len(kept))):
        longest = max((graph.tail_s[s] for s in graph.successors[i]), default=0.0)
        graph.tail_s[i] = graph.compute_s[i] + graph.travel_s[i] + longest
    return graph


class OpOrder:
    """A new order of ops, each after the producers of its operands. deferred: ops to append once a
    message is in flight that they hide."""

    def __init__(self) -> None:
        self.order: dict[Operation, None] = {}
        self.deferred: list[Operation] = []

    def add(self, op: Operation) -> None:
        """Append an op, after the ops that produce its operands if these are missing."""
        if op in self.order:
            return
        for value in op.operands:
            owner = value.owner
            if isinstance(owner, Operation) and owner not in self.order:
                self.add(owner)
        self.append(op)

    def append(self, op: Operation) -> None:
        self.order[op] = None

    def catch_up(self) -> None:
        deferred, self.deferred = self.deferred, []
        for op in deferred:
            self.add(op)

    def finished(self, ops: Sequence[Operation]) -> list[Operation]:
        """Append the deferred ops and all other missing ops; returns the order."""
        for op in (*self.deferred, *ops):
            self.add(op)
        return list(self.order)


def leading_to(ops: Sequence[Operation], goals: Collection[Operation]) -> set[Operation]:
    """Return `goals` and all of `ops`, in program order, that they depend on. Linear in uses."""
    leading: set[Operation] = set()
    for op in reversed(ops):
        users = (use.operation for result in op.results for use in result.uses)
        if op in goals or any(user in leading for user in users):
            leading.add(op)
    return leading


def wait_of(start: Operation) -> Operation:
    return next(use.operation for result in start.results for use in result.uses)


def producer_of(value: SSAValue) -> Operation | None:
    """The op that computes a value; a wait counts as its start. None for a block argument."""
    owner = value.owner
    if isinstance(owner, WaitOp):
        owner = owner.operands[0].owner
    return owner if isinstance(owner, Operation) else None
