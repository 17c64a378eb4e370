"""Interleaving sub-batches at their communications: Merak's and Oases' orders.

Each sub-batch is a thread of ops in program order. Oases' Algorithm 1 runs the ops of one thread up
to a communication; there it waits for the one in flight, starts this one, and switches to the next
thread, whose compute hides it. Algorithm 2 does the same in the backward pass. There a thread's ops
are, segment by segment in reverse, its recomputation and its backward ops: recomputation of the
next segment needs no message, and so overlaps the all-reduce of the last segment's input gradient.
Threads follow from the program, so that any blocks that end in collectives interleave, not
transformer layers alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import Copy, copy_of, phase_of
from shardweave.ir.dialects.dist import StartedOp, WaitOp
from shardweave.planners.overlap.graph import wait_of


def pass_regions(ops: Sequence[Operation]) -> list[list[Operation]]:
    """Split ops into forward, then alternating recomputation and backward (Merak's barriers)."""
    regions: list[list[Operation]] = []
    before: str | None = None
    for op in ops:
        kind = phase_of(op)
        if before is not None and kind != "recompute" and not before == kind == "forward":
            kind = "backward"  # ops that do not depend on the gradient stand among those that do
        if kind != before:
            regions.append([])
        regions[-1].append(op)
        before = kind
    return regions


def whole_regions(ops: Sequence[Operation]) -> list[list[Operation]]:
    """Split ops into forward and the rest: no barrier between recomputation and backward."""
    for index, op in enumerate(ops):
        if phase_of(op) in ("backward", "recompute"):
            return [list(ops[:index]), list(ops[index:])]
    return [list(ops)]


def interleave(regions: Iterable[Sequence[Operation]]) -> list[Operation]:
    """Order all ops so that sub-batches interleave inside each region.

    Each wait moves to just before the next start of another thread or the first use, or to the end
    of the region. Dependences are kept. Takes O(n log n) time.
    """
    interleaver = _Interleaver()
    for region in regions:
        interleaver.run(region)
    interleaver.finish()
    return interleaver.order


class _Interleaver:
    def __init__(self) -> None:
        self.order: list[Operation] = []
        self.emitted: set[Operation] = set()
        self.in_flight: Operation | None = None
        self.waits: list[Operation] = []
        self.shared: list[Operation] = []
        self.missing: dict[Operation, int] = {}
        self.places: dict[Operation, int] = {}

    def run(self, region: Sequence[Operation]) -> None:
        threads: dict[Copy, list[Operation]] = {}
        self.shared = []
        for op in region:
            thread = copy_of(op)
            if isinstance(op, WaitOp):
                self.waits.append(op)
            elif thread is None:
                self.shared.append(op)
            else:
                threads.setdefault(thread, []).append(op)
        self._expect()
        self._alternate(list(threads.values()))
        # What is left keeps the order of the program.
        self.missing.clear()
        for op in self.shared:
            self._emit(op)
        self._arrive()

    def finish(self) -> None:
        """Append the waits that are still missing, those for gradients over the data axis."""
        for wait in self.waits:
            self._emit(wait)

    def _alternate(self, threads: list[list[Operation]]) -> None:
        """Run the threads in turn, each up to its next communication."""
        positions = [0] * len(threads)
        current = 0
        while any(p < len(t) for p, t in zip(positions, threads, strict=True)):
            ops = threads[current]
            while positions[current] < len(ops):
                op = ops[positions[current]]
                positions[current] += 1
                if op in self.emitted:
                    continue
                if isinstance(op, StartedOp):
                    self._start(op)
                    break
                self._emit(op)
            current = (current + 1) % len(threads)

    def _start(self, op: Operation) -> None:
        """Wait for the communication in flight, then start this one."""
        self._feed(op)
        self._arrive()
        self._append(op)
        self.in_flight = wait_of(op)

    def _arrive(self) -> None:
        if self.in_flight is not None and self.in_flight not in self.emitted:
            self._append(self.in_flight)
        self.in_flight = None

    def _expect(self) -> None:
        """Count the missing producers of each shared op, so that it is emitted once it can run."""
        for place, op in enumerate(self.shared):
            self.places[op] = place
            producers = {p for p in _producers(op) if p not in self.emitted}
            self.missing[op] = len(producers)

    def _feed(self, op: Operation) -> None:
        """Emit the producers of an op's operands that are missing, in dependence order."""
        stack = [op]
        while stack:
            top = stack[-1]
            needed = [p for p in _producers(top) if p not in self.emitted]
            if needed:
                stack.extend(needed)
                continue
            stack.pop()
            if top is not op and top not in self.emitted:
                self._append(top)

    def _emit(self, op: Operation) -> None:
        if op not in self.emitted:
            self._feed(op)
            self._append(op)

    def _append(self, op: Operation) -> None:
        """Emit an op and, in program order, the shared ops that can then run."""
        complete: list[int] = []
        while op not in self.emitted:
            self.emitted.add(op)
            self.order.append(op)
            for user in dict.fromkeys(use.operation for r in op.results for use in r.uses):
                if user in self.missing:
                    self.missing[user] -= 1
                    if self.missing[user] == 0:
                        heapq.heappush(complete, self.places[user])
            if complete:
                op = self.shared[heapq.heappop(complete)]


def _producers(op: Operation) -> dict[Operation, None]:
    return {v.owner: None for v in op.operands if isinstance(v.owner, Operation)}
