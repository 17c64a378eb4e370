"""Schedule `in-order`: program order of compute, with messages in flight as long as possible.

Compute stays in order; a message starts as soon as its operand exists, and is waited for before
its first use. Beyond that,

- sharded weights of a block are gathered while the block before it computes,
- the keys and values of a slice of attention are gathered while the slice before it computes,
- scattered gradients are waited for one block later, which bounds the unsharded gradients,
- where the backward pass would wait for a message within a block (such as a tensor-parallel input
gradient), it computes the block's weight gradients meanwhile.

No costs are needed. Takes time linear in the ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import Copy, copy_of, layer_of, phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import STARTS, AllGatherOp, ReduceScatterOp, StartedOp, WaitOp
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.ops.registry import is_positional, spec_of
from shardweave.ir.program.blocks import Blocks, blocks_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import is_view
from shardweave.passes.messages.merge_collectives import BUCKET_BYTES
from shardweave.planners.overlap.graph import OpOrder, leading_to, wait_of

Place = tuple[str | None, str, Copy | None]
"""(Block, phase, sub-batch) of an op."""


def started_in_order(
    program: Program, ops: Sequence[Operation], *, is_ahead: bool = True
) -> list[Operation]:
    """Order the ops of a program whose collectives are started and waited for. ops: in program
    order. is_ahead: gather weights a block ahead. False gathers weights only where they are read
    and defers no ops, which needs the least memory."""
    return _InOrder(program, ops, is_ahead).run()


@dataclass
class _Run:
    """Consecutive gathers or reduce-scatters of one block, phase and sub-batch."""

    place: Place
    starts: list[Operation] = field(default_factory=list[Operation])
    bytes: int = 0


def _runs(starts: Sequence[Operation], blocks: Blocks) -> list[_Run]:
    runs: list[_Run] = []
    for op in starts:
        place = blocks.of_op(op), phase_of(op), copy_of(op)
        size = sum(num_bytes(tensor_type_of(v)) for v in (*op.operands, *op.results))
        if not runs or runs[-1].place != place or runs[-1].bytes + size > BUCKET_BYTES:
            runs.append(_Run(place))
        runs[-1].starts.append(op)
        runs[-1].bytes += size
    return runs


class _InOrder(OpOrder):
    def __init__(self, program: Program, ops: Sequence[Operation], is_ahead: bool) -> None:
        super().__init__()
        self.ops = ops
        self.is_ahead = is_ahead
        self.blocks = blocks_of(program)
        weights = Weights(program, ops)
        self.bringers = weights.bringers
        self.gathers = _runs(weights.starts, self.blocks)
        self.gather_run = {op: i for i, run in enumerate(self.gathers) for op in run.starts}
        self.parts = weights.parts
        self.again = {op: i for i, op in enumerate(self._read_again(weights)) if op is not None}
        scatters = [op for op in ops if isinstance(op, STARTS[ReduceScatterOp])]
        self.scatters = _runs([op for op in scatters if is_last(op)], self.blocks)
        self.scatter_run = {op: i for i, run in enumerate(self.scatters) for op in run.starts}
        # An op that joins gradients into a message copies them.
        for op, i in list(self.scatter_run.items()):
            maker = op.operands[0].owner
            if isinstance(maker, Operation) and _is_joining(maker):
                self.scatter_run[maker] = i
        self.joints = {
            op
            for op in ops
            if isinstance(op, StartedOp) and op not in self.gather_run and not is_last(op)
        }
        self.next_part = self._next_part() if is_ahead else {}
        self.leading = leading_to(self.ops, self.joints)
        self.joints_left = len(self.joints)

    def run(self) -> list[Operation]:
        for op in self.ops:
            if op in self.again:
                self._start(self.again[op] + 1)
            if op in self.gather_run:
                self._reach(self.gather_run[op])
            elif op in self.order or isinstance(op, WaitOp) or _shows_result(op):
                continue  # is added before what reads it
            elif op in self.bringers and not is_view(op):
                continue
            elif self._can_wait(op):
                self.deferred.append(op)
            else:
                for start in self.next_part.get(op, ()):
                    self.add(start)
                self.add(op)
                if op in self.joints:
                    self.joints_left -= 1
                    self.catch_up()
        return self.finished(self.ops)

    def append(self, op: Operation) -> None:
        """Append an op; an op of a run of reduce-scatters after the waits of the run before it."""
        number = self.scatter_run.get(op, 0)
        for run in self.scatters[max(0, number - 1) : number]:
            for start in run.starts:
                self.add(wait_of(start))
        super().append(op)

    # Weights

    def _reach(self, number: int) -> None:
        """Append the gathers of run `number`, read next, and of the next run if `is_ahead`."""
        for op in self.gathers[number].starts:
            self.add(op)
        if not self.is_ahead:
            return
        for op in self.gathers[number].starts:
            # Weights are unpacked from a message before the next one takes memory.
            for part in self.parts.get(op, ()):
                self.add(part)
        if number not in self.again.values():
            self._start(number + 1)

    def _start(self, number: int) -> None:
        for run in self.gathers[number : number + 1]:
            for op in run.starts:
                self.add(op)

    def _read_again(self, weights: Weights) -> Iterator[Operation | None]:
        """Yield, per run, None; for forward's last run, its first reader in the backward pass."""
        for before, after in zip_longest(self.gathers, self.gathers[1:]):
            is_last = after is not None and before.place[1] == "forward" != after.place[1]
            starts = before.starts if is_last else []
            values = {value for op in starts for value in weights.made_of[op]}
            yield next(
                (
                    op
                    for op in (self.ops if is_last else ())
                    if phase_of(op) == "backward" and any(v in values for v in op.operands)
                ),
                None,
            )

    # Parts of attention

    def _next_part(self) -> dict[Operation, list[Operation]]:
        """Map each part of an attention to the gathers that the following part reads."""
        next_part: dict[Operation, list[Operation]] = {}
        parts = [op for op in self.ops if is_positional(op)]
        for before, after in pairwise(parts):
            places = [(layer_of(op), phase_of(op), copy_of(op)) for op in (before, after)]
            if places[0] == places[1]:
                waits = (v.owner for v in after.operands if isinstance(v.owner, WaitOp))
                starts = [wait.operands[0].owner for wait in waits]
                next_part[before] = [op for op in starts if isinstance(op, STARTS[AllGatherOp])]
        return next_part

    # Gradients

    def _can_wait(self, op: Operation) -> bool:
        """True if an op can be deferred until a message of its block is in flight."""
        if not self.is_ahead or not self.joints_left:
            return False
        if self.deferred and self.blocks.of_op(self.deferred[0]) != self.blocks.of_op(op):
            self.catch_up()
        return phase_of(op) == "backward" and op not in self.leading


class Weights:
    """Gathers of weights.

    starts: started gathers that depend only on parameters. bringers: these, and the ops that
    produce their operands. made_of: by start, its weights and all views of them. parts: by start of
    a joined gather, the ops that unpack it.
    """

    def __init__(self, program: Program, ops: Sequence[Operation]) -> None:
        self.starts: list[Operation] = []
        self.made_of: dict[Operation, list[SSAValue]] = {}
        self.parts: dict[Operation, list[Operation]] = {}
        feeding: list[Operation] = []
        known: set[SSAValue] = {slot.value for slot in program.arguments if slot.kind == "param"}
        source: dict[SSAValue, Operation] = {}
        for op in ops:
            is_gather = isinstance(op, STARTS[AllGatherOp])
            brings = is_gather or spec_of(op).keeps_weight or _is_joining(op)
            if brings and op.operands and all(value in known for value in op.operands):
                known.update(op.results)
                feeding.append(op)
            if is_gather and op.results[0] in known:
                self.starts.append(op)
                self.made_of[op] = list(wait_of(op).results)
                source.update(dict.fromkeys(self.made_of[op], op))
            elif spec_of(op).view not in (None, "cast") and op.operands[0] in source:
                self._take(op, source)
        self.bringers = self._needed(feeding)

    def _take(self, op: Operation, source: dict[SSAValue, Operation]) -> None:
        (value,), (result,) = op.operands, op.results
        start = source[result] = source[value]
        self.made_of[start].append(result)
        is_ahead = phase_of(start) == "forward" != phase_of(op)  # unpacked by the backward pass
        if not is_ahead and (spec_of(op).view == "part" or start in self.parts):
            self.parts.setdefault(start, []).append(op)

    def _needed(self, feeding: Sequence[Operation]) -> set[Operation]:
        needed: set[Operation] = set(self.starts)
        for op in reversed(feeding):
            if any(use.operation in needed for result in op.results for use in result.uses):
                needed.add(op)
        return needed.difference(self.starts)


def _is_joining(op: Operation) -> bool:
    return isinstance(op, AtenOp) and op.name == "aten.cat"


def is_last(start: Operation) -> bool:
    """True if no op reads a message's result, except views that are only returned."""
    return all(map(_is_returned, wait_of(start).results))


def _is_returned(value: SSAValue) -> bool:
    return all(
        isinstance(user, ReturnOp) or (_is_light(user) and all(map(_is_returned, user.results)))
        for user in _users(value)
    )


def _users(value: SSAValue) -> Iterator[Operation]:
    return (use.operation for use in value.uses)


def _is_light(op: Operation) -> bool:
    return spec_of(op).may_share


def _shows_result(op: Operation) -> bool:
    return _is_light(op) and all(map(_is_returned, op.results))
