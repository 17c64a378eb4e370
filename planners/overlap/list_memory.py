"""Memory during list scheduling: bytes that ops allocate, and that the last readers free.

A list schedule runs ops as early as possible, so values would live long, above all recomputed ones.
A `MemoryBudget` admits an op only while the live bytes stay under a cap, and `recompute_gates` lets
recomputation run at most a few communications before its position in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import Copy, copy_of, phase_of
from shardweave.ir.dialects.dist import WaitOp
from shardweave.ir.program.program import Program
from shardweave.planners.cost.memory import held_by, storages_of
from shardweave.planners.overlap.graph import Graph


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
