"""fuse-kernels: ops, and then regions, merge; pairs that save most memory traffic go first."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import (
    common_path,
    copy_of,
    layer_of,
    phase_of,
    set_copy,
    set_layer,
    set_phase,
)
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import CollectiveOp, WaitOp
from shardweave.ir.dialects.kernel import escaping_values, fuse
from shardweave.ir.ops.fusible import MAX_OPS, MAX_VALUES, role_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.iteration_space import computed_aside, is_kernel_alone, space_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import copies
from shardweave.ir.program.traffic import traffic
from shardweave.ir.sharding.flow import is_propagated
from shardweave.ir.sharding.ragged import ragged_values
from shardweave.passes.kernels.unfuse_kernels import require_no_regions
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

NEAR = 64
"""Largest distance, in ops, between two merged readers of a value: the results of the earlier one
are kept until those of the later one are read."""

FEW = 8
"""Most readers of one value that are tried in one kernel, nearest first; a table of positions, for
example, is read by every layer."""


@dataclass(eq=False)
class Unit:
    """One op, or several that will form one kernel. place: the index at which it runs."""

    ops: dict[Operation, int]
    key: tuple[object, ...]
    block: str | None
    traffic: int
    place: int


class Growth:
    """Units of ops, merged step by step; their places are always a valid order of execution."""

    def __init__(self, program: Program, *, matmul: bool) -> None:
        self.places = {op: index for index, op in enumerate(program.ops)}
        self.units: dict[Operation, Unit] = {}
        self.views: dict[Operation, tuple[object, ...]] = {}
        self.heap: list[tuple[int, int, int, Unit, Unit]] = []
        self.pushed = 0
        self.readers: dict[SSAValue, list[Operation]] = {}
        blocks = blocks_of(program)
        for op, key in keys_of_ops(program):
            role = role_of(op)
            if role == "view" and not copies(op):
                self.views[op] = key
            elif role is not None and (matmul or role != "matmul"):
                place = self.places[op]
                moved = traffic([op])
                self.units[op] = Unit({op: place}, key, blocks.of_op(op), moved, place)

    def grow(self) -> None:
        """Merge units until no merge saves bytes."""
        for unit in list(self.units.values()):
            for other in self._neighbours(unit):
                if other.place > unit.place:
                    self._push(unit, other)
        while self.heap:
            saved, _, _, first, second = heapq.heappop(self.heap)
            if not (first.ops and second.ops):
                continue
            merged = self._merged(first, second)
            if merged is None:
                continue
            now = first.traffic + second.traffic - merged.traffic
            if now < -saved:
                self._push(first, second, now)
            else:
                self._replace(first, second, merged)
        self._take_along()

    def _take_along(self) -> None:
        """Merge units near kernels whose results are all small; each merge saves a launch."""
        units = sorted({id(u): u for u in self.units.values()}.values(), key=lambda u: u.place)
        for number, unit in enumerate(units):
            written = escaping_values(unit.ops)
            members = [op for op in unit.ops if isinstance(op, AtenOp)]
            if not written or computed_aside(members, written) != set(written):
                continue
            near = [u for u in units[max(0, number - FEW) : number + FEW] if u is not unit]
            for other in sorted(near, key=lambda u: abs(u.place - unit.place)):
                merged = self._merged(unit, other) if other.ops else None
                if merged is not None and abs(other.place - unit.place) <= NEAR:
                    self._replace(unit, other, merged)
                    units[number] = merged
                    break

    def regions(self) -> list[Unit]:
        """Return, by place, the units of several ops, and single ops that are kernels alone."""
        units = {
            id(unit): unit
            for unit in self.units.values()
            if len(unit.ops) > 1 or all(map(is_kernel_alone, unit.ops))
        }
        return sorted(units.values(), key=lambda unit: unit.place)

    # Candidates

    def _push(self, first: Unit, second: Unit, saved: int | None = None) -> None:
        if first.key != second.key:
            return
        if saved is None:
            merged = self._merged(first, second)
            if merged is None:
                return
            saved = first.traffic + second.traffic - merged.traffic
        if saved <= 0:
            return
        self.pushed += 1
        # Of equal savings, first those that leave the matrix products to the library.
        products = sum(spec_of(op).role == "matmul" for unit in (first, second) for op in unit.ops)
        heapq.heappush(self.heap, (-saved, products, self.pushed, first, second))

    def _neighbours(self, unit: Unit) -> list[Unit]:
        """A unit's producers, consumers, and readers of its operands, also through views."""
        neighbours: dict[int, Unit] = {}
        for owner in self._related(unit):
            other = self.units.get(owner) if isinstance(owner, Operation) else None
            if other is not None and other is not unit:
                neighbours[id(other)] = other
        return list(neighbours.values())

    def _related(self, unit: Unit) -> Iterator[Operation | Block]:
        for op in unit.ops:
            for value in op.operands:
                source = self._source(value)
                yield source.owner
                for user in self._readers_near(source, self.places[op]):
                    other = self.units.get(user)
                    if other is not None and other.block == unit.block:
                        yield user
            for value in op.results:
                yield from islice(self._readers(value), FEW)

    def _source(self, value: SSAValue) -> SSAValue:
        """The value at the root of a chain of views that belong to no unit."""
        owner = value.owner
        while isinstance(owner, Operation) and owner in self.views:
            value = owner.operands[0]
            owner = value.owner
        return value

    def _readers_near(self, value: SSAValue, place: int) -> list[Operation]:
        """The readers of a value nearest to index `place`: at most FEW, at most NEAR away."""
        place_of = self.places.__getitem__
        if value not in self.readers:
            known = (reader for reader in self._readers(value) if reader in self.places)
            self.readers[value] = sorted(set(known), key=place_of)
        readers = self.readers[value]
        first = bisect_left(readers, place - NEAR, key=place_of)
        last = bisect_right(readers, place + NEAR, key=place_of)
        return sorted(readers[first:last], key=lambda reader: abs(place_of(reader) - place))[:FEW]

    def _readers(self, value: SSAValue) -> Iterator[Operation]:
        pending = [value]
        while pending:
            for use in pending.pop().uses:
                if use.operation in self.views:
                    pending += use.operation.results
                else:
                    yield use.operation

    # Merging

    def _merged(self, first: Unit, second: Unit) -> Unit | None:
        """Merge two units, with the views between them; None if one kernel cannot compute both."""
        if first.key != second.key or len(first.ops) + len(second.ops) > MAX_OPS:
            return None
        members = first.ops | second.ops
        for op in list(members):
            self._take_views(op, members, first.key)
        escaping = escaping_values(members)
        inputs = {v for op in members for v in op.operands if v.owner not in members}
        if len(escaping) + len(inputs) > MAX_VALUES:
            return None
        place = self._place(members, inputs, escaping)
        if place is None or isinstance(space_of(_in_order(members), escaping), str):
            return None
        return Unit(members, first.key, first.block, traffic(_in_order(members)), place)

    def _take_views(
        self, op: Operation, members: dict[Operation, int], key: tuple[object, ...]
    ) -> None:
        """Add to `members` the views through which `op` reads a result of another member."""
        for operand in op.operands:
            chain: list[Operation] = []
            owner = operand.owner
            while isinstance(owner, Operation) and self.views.get(owner) == key:
                chain.append(owner)
                owner = owner.operands[0].owner
            if isinstance(owner, Operation) and owner in members:
                members.update((view, self.places[view]) for view in chain)

    def _place(
        self, members: dict[Operation, int], inputs: set[SSAValue], escaping: list[SSAValue]
    ) -> int | None:
        """The last member's index that is after all producers and before all consumers, or None."""
        low = max((self._place_of(value.owner) for value in inputs), default=-1)
        users = {u.operation for v in escaping for u in v.uses if u.operation not in members}
        high = min((self._place_of(user) for user in users), default=len(self.places))
        return max((place for place in members.values() if low < place < high), default=None)

    def _place_of(self, owner: object) -> int:
        if not isinstance(owner, Operation):
            return -1
        unit = self.units.get(owner)
        if unit is not None:
            return unit.place
        return self.places.get(owner, len(self.places))  # the return comes last

    def _replace(self, first: Unit, second: Unit, merged: Unit) -> None:
        for op in merged.ops:
            self.units[op] = merged
            self.views.pop(op, None)
        first.ops, second.ops = {}, {}
        for other in self._neighbours(merged):
            self._push(merged, other)


def keys_of_ops(program: Program) -> Iterator[tuple[Operation, tuple[object, ...]]]:
    """Yield each op with its key; ops may be fused only if their keys are equal.

    Keys are equal between the same two collectives, in one sub-batch and phase. In each sub-batch,
    ops after the first backward op count as backward. An op on ragged rows has a key of its own,
    since kernels need fixed sizes.
    """
    segment = 0
    turned: set[object] = set()
    ragged = ragged_values(program.ops)
    for op in program.ops:
        copy, phase = copy_of(op), phase_of(op)
        if isinstance(op, (CollectiveOp, WaitOp)):
            segment += 1
        if phase == "backward":
            turned.add(copy)
        elif phase == "forward" and copy in turned:
            phase = "backward"
        own = None if ragged.isdisjoint((*op.operands, *op.results)) else op
        yield op, (segment, copy, phase, own)


def _in_order(members: dict[Operation, int]) -> list[Operation]:
    return sorted(members, key=members.__getitem__)


def _write_region(unit: Unit) -> None:
    """Move the ops of a unit into a region, at its place."""
    ops = _in_order(unit.ops)
    anchor = next(op for op in ops if unit.ops[op] == unit.place)
    after = anchor.next_op
    assert after is not None
    while after in unit.ops:
        after = after.next_op
        assert after is not None
    phase = unit.key[2]
    assert isinstance(phase, str)
    put_in_region(ops, after, [unit.ops[op] for op in ops], phase)


def put_in_region(ops: list[Operation], before: Operation, places: list[int], phase: str) -> None:
    """Move ops of one sub-batch into a region, which gets their layer, phase and sub-batch."""
    fused = fuse(ops, before, places)
    set_layer(fused, common_path(map(layer_of, ops)))
    set_phase(fused, phase)
    copy = copy_of(ops[0])
    if copy is not None:
        set_copy(fused, copy)


@dataclass(frozen=True)
class FuseKernelsPass(PassOnProgram):
    """Put ops that exchange or share much data into regions, each to be one kernel.

    Regions grow greedily: of all pairs whose union one kernel can compute
    (`ir.program.iteration_space`), the one that saves most bytes of memory traffic is merged
    first. A region never reaches across a collective, its start or its wait, from one phase or
    sub-batch into another, and the ops that stay outside keep their order; each unit has a place
    after the producers of all its operands and before all readers of its results, so that there
    are no cycles. `matmul=false` leaves matrix products to the library.

    Requires: a verified program without regions, not between `propagate-shardings` and
    `insert-collectives`. Ensures: numerics unchanged; `unfuse-kernels`
    gives back the same program. Takes n log n steps for n ops: an op has few neighbours and a
    region few ops.
    """

    name = "fuse-kernels"
    matmul: bool = True

    def run(self, program: Program) -> None:
        require_no_regions(program)
        if not program.is_local and is_propagated(program):
            raise ValueError(
                "the program is propagated but not partitioned, and a fused region would have no "
                "sharding; run insert-collectives before fuse-kernels."
            )
        growth = Growth(program, matmul=self.matmul)
        growth.grow()
        units = growth.regions()
        for unit in units:
            _write_region(unit)
        if not units:
            note("nothing is fused: no two ops that fit a kernel share data; leave the pass out.")
