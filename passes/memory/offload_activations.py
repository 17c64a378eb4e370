"""Offloading: activations are copied to host memory until the backward pass reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from xdsl.ir import Operation, OpResult, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import (
    Copy,
    copy_of,
    phase_of,
    set_phase,
    set_sharding_attrs,
    sharding_attrs_of_value,
)
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist import (
    HOST_COPIES,
    DistOp,
    HostCopyOp,
    StartedOp,
    ToDeviceOp,
    ToHostOp,
    create_dist,
)
from shardweave.ir.dialects.types import num_bytes, shape_of, tensor_type_of
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.blocks import blocks_of, weight_ops
from shardweave.ir.program.program import Program, sharding_of
from shardweave.ir.program.staged import StageFunction
from shardweave.ir.program.storage import is_view, kept_bytes, later_ops, later_reads
from shardweave.passes.messages.start_collectives import started
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

VALUES = ("inputs", "all")


@dataclass(frozen=True, eq=False)
class _Kept:
    """A forward value that the backward pass reads. reads: (backward op, operand), where the
    operand is the value or a view of it. last: index of the last forward op that reads it. first:
    index of the first backward op that does."""

    value: SSAValue
    reads: Sequence[tuple[Operation, SSAValue]]
    last: int
    first: int

    @property
    def size(self) -> int:
        return num_bytes(tensor_type_of(self.value))


def offload(program: Program, values: str, least_bytes: int, budget: int | None) -> int:
    """Copy values to the host after their last forward use, and back before their first later use,
    in place; return how many. Takes time linear in the ops.

    values: `inputs` of blocks, or `all` that the backward pass of one block reads. least_bytes:
    size from which a value is offloaded. budget: bytes that may stay on the device; the values
    computed first are offloaded until the rest fits. Raises ValueError if it never does.
    """
    chosen = _offloadable(program, values, least_bytes)
    if budget is not None:
        chosen = _within(budget, kept_bytes(program), chosen)
    ops = list(program.ops)
    for kept in chosen:
        _offload(kept, ops)
    return len(chosen)


def _within(budget: int, needed: int, candidates: Iterable[_Kept]) -> list[_Kept]:
    chosen: list[_Kept] = []
    for kept in candidates:
        if needed <= budget:
            break
        chosen.append(kept)
        needed -= kept.size
    if needed > budget:
        raise ValueError(
            f"bytes={budget} is too small: after offloading all values that can be offloaded, "
            f"the backward pass still needs {needed} bytes on the device, {needed - budget} "
            f"more; give at least bytes={needed}, or recompute (rematerialize)."
        )
    return chosen


def _offloadable(program: Program, values: str, least_bytes: int) -> list[_Kept]:
    """The values that can be offloaded, in the order in which they are made."""
    blocks, turned = blocks_of(program), later_ops(program)
    later = set(filter(_is_backward, turned))
    places = {op: place for place, op in enumerate(program.ops)}
    kept_anyway: set[SSAValue] = {result for op in weight_ops(program) for result in op.results}
    kept_anyway.update(_viewed(slot.value) for slot in program.results)
    reads: dict[SSAValue, list[tuple[Operation, SSAValue]]] = {}
    for op, value in later_reads(program, later):
        reads.setdefault(_viewed(value), []).append((op, value))
    products = list(accumulate((flops_of(op) > 0 for op in program.ops), initial=0))
    chosen: list[_Kept] = []
    for value, pairs in reads.items():
        maker, readers = value.owner, [op for op, _ in pairs]
        if not isinstance(maker, Operation) or isinstance(maker, StartedOp) or maker in turned:
            continue
        in_blocks = set(map(blocks.of_op, readers))
        enters = values == "all" or blocks.of_op(maker) not in in_blocks
        if len(in_blocks) > 1 or None in in_blocks or not enters or value in kept_anyway:
            continue
        early = [maker, *(op for op in _readers(value) if op not in later and not is_view(op))]
        last, first = max(places[op] for op in early), min(places[op] for op in readers)
        kept = _Kept(value, pairs, last, first)
        is_long = last < first and products[last + 1] < products[first]
        is_alike = len(set(map(copy_of, early + readers))) == 1 and _varies(value, program)
        if is_long and is_alike and kept.size >= least_bytes:
            chosen.append(kept)
    return sorted(chosen, key=lambda kept: kept.last)


def _is_backward(op: Operation) -> bool:
    return phase_of(op) != "forward"


def _varies(value: SSAValue, program: Program) -> bool:
    """True if the value differs between micro-batches, or if a step has only one."""
    times = set(program.mesh.time_names if program.mesh else ())
    (attr,) = sharding_attrs_of_value(value) or (None,)
    return not times or not times.isdisjoint(sharding_of(attr, shape_of(value), program).axes)


def _viewed(value: SSAValue) -> SSAValue:
    """The value that `value` is a view of, through any chain of views; else `value` itself."""
    while isinstance(value.owner, Operation) and is_view(value.owner):
        value = value.owner.operands[0]
    return value


def _readers(value: SSAValue) -> Iterator[Operation]:
    """The ops that read a value, or a view of it."""
    for use in value.uses:
        yield use.operation
        if is_view(use.operation):
            for result in use.operation.results:
                yield from _readers(result)


def _offload(kept: _Kept, ops: Sequence[Operation]) -> None:
    reader = ops[kept.first]
    host = _copied(ToHostOp, kept.value, Builder.after(ops[kept.last], reader))
    set_phase(host.op, "forward")
    before = Builder.before(reader)
    shown = {kept.value: _copied(ToDeviceOp, host, before)}
    for op, value in kept.reads:
        back = _shown(value, shown, before)
        op.operands = [back if operand is value else operand for operand in op.operands]
    for view in reversed([value for value in shown if value.first_use is None]):
        assert isinstance(view, OpResult)
        Rewriter.erase_op(view.op)


def _copied(kind: type[DistOp], value: SSAValue, place: Builder) -> OpResult:
    copy = place.insert(create_dist(kind, [value], [value.type]))
    copy.properties.pop("origin", None)
    set_sharding_attrs(copy, sharding_attrs_of_value(value))
    return copy.results[0]


def _shown(value: SSAValue, shown: dict[SSAValue, OpResult], place: Builder) -> OpResult:
    """Repeat the chain of views `value` on the copied-back value; `shown` maps views to repeats."""
    if value not in shown:
        assert isinstance(value, OpResult)
        (source,) = value.op.operands
        copy = value.op.clone({source: _shown(source, shown, place)})
        for name in ("layer", "phase"):
            copy.properties.pop(name, None)
        shown[value] = place.insert(copy, value).results[0]
    return shown[value]


# Starts and waits


def start_host_copies(program: Program) -> None:
    """Replace each copy to or from the host by a start and a wait; all other ops keep their order.

    A copy to the host starts after the last forward op that reads the value; the wait for it stands
    where the copies of the next block start. A copy back starts where the backward pass first reads
    a copied value of the block before (for the first such block, at the first product after the
    forward pass); the wait for it stands before its first reader. Takes time linear in the ops.
    """
    _HostCopies(program).start()


Run = list[tuple[int, HostCopyOp]]
"""The copies of one block, each with the index of the op before which it can start or is needed."""


class _HostCopies:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops = list(program.ops)
        self.places: dict[Operation, int] = {op: place for place, op in enumerate(self.ops)}
        self.places[program.return_op] = len(self.ops)
        self.blocks = blocks_of(program)
        self.ends: dict[Copy | None, int] = {}
        """Place of the first backward op of each sub-batch. Gathers for recomputation may run ahead
        of it, in the forward pass."""
        self.products: dict[Copy | None, int] = {}
        """Place of the first product after the forward pass of each sub-batch."""
        for place, op in enumerate(self.ops):
            if phase_of(op) == "backward":
                self.ends.setdefault(copy_of(op), place)
            if _is_backward(op) and flops_of(op):
                self.products.setdefault(copy_of(op), place)
        self.added: list[tuple[int, int, Operation]] = []
        """New ops, each with the place that it goes before, and its order among those there."""

    def start(self) -> None:
        waits: dict[HostCopyOp, Operation] = {}
        away: dict[SSAValue, int] = {}
        for copy, runs in self._runs(ToHostOp, self._left_at):
            end = self._end(copy)
            for run, until in zip(runs, [*(run[0][0] for run in runs[1:]), end], strict=True):
                for place, op in run:
                    wait = away[op.copied] = max(place, min(until, self._read_at(op)))
                    ranks = 1, 0 if wait > place else 2
                    waits[op] = self._add(op, (place, wait), ranks)
        for copy, runs in self._runs(ToDeviceOp, self._read_at):
            first = self.products.get(copy, len(self.ops))
            for run, begin in zip(runs, [first, *(run[0][0] for run in runs[:-1])], strict=True):
                for place, op in run:
                    start = max(away.get(op.value, 0), min(begin, place))
                    waits[op] = self._add(op, (start, place), (3, 4))
        for place, _, op in sorted(self.added, key=lambda each: each[:2]):
            behind = self.ops[place] if place < len(self.ops) else self.program.return_op
            Rewriter.insert_op(op, InsertPoint.before(behind))
        for op, wait in waits.items():
            Rewriter.replace_op(op, [], wait.results)

    def _runs(
        self, kind: type[HostCopyOp], place_of: Callable[[HostCopyOp], int]
    ) -> Iterator[tuple[Copy | None, list[Run]]]:
        """Yield each sub-batch with its copies of one `kind`, grouped by block, in order."""
        copies: dict[Copy | None, Run] = {}
        for op in self.ops:
            if isinstance(op, kind):
                copies.setdefault(copy_of(op), []).append((place_of(op), op))
        for copy, run in copies.items():
            run.sort(key=lambda pair: pair[0])
            groups = groupby(run, key=lambda pair: self.blocks.of_op(pair[1]))
            yield copy, [list(group) for _, group in groups]

    def _end(self, copy: Copy | None) -> int:
        return self.ends.get(copy, len(self.ops))

    def _left_at(self, op: HostCopyOp) -> int:
        """The index after the last forward op that reads the copied value."""
        end = max(self.places[op], self._end(copy_of(op)))
        limit = min(end, self._read_at(op))
        users = [each for each in (op.value.owner, *_readers(op.value)) if each is not op]
        known = [self.places[each] for each in users if isinstance(each, Operation)]
        return 1 + max(place for place in known if place < limit)

    def _read_at(self, op: HostCopyOp) -> int:
        return min((self.places[use.operation] for use in op.copied.uses), default=self.places[op])

    def _add(self, op: HostCopyOp, places: tuple[int, int], ranks: tuple[int, int]) -> Operation:
        """Add a copy's start and wait before the ops at two indices; returns the wait."""
        pair = started(op, HOST_COPIES[type(op)])
        self.added += zip(places, ranks, pair, strict=True)
        return pair[1]


@dataclass(frozen=True)
class OffloadActivationsPass(PassOnProgram):
    """Copy values that the backward pass reads to the host after their last forward use, and back.

    `values`: `inputs` (default), values that enter blocks; or `all` values that the backward pass
    of one block alone reads. Left on the device are values below `least_bytes`, gathered weights,
    results of the step, and values that are read again before the next product. With `bytes`, the
    values computed first are offloaded, until the device keeps at most `bytes` for the backward
    pass. Copies block until `overlap-communication` splits them: the wait for a copy to the host
    moves one block later, and a copy back starts one block earlier.

    Requires: a local program with forward and backward ops, after `rematerialize`, before
    `cut-stages` and `overlap-communication`. Ensures: numerics unchanged, bit for bit; values are
    on the device where they are read. Takes time linear in the ops.
    """

    name = "offload-activations"
    values: str = VALUES[0]
    bytes: int | None = None
    least_bytes: int = 0

    def run(self, program: Program) -> None:
        if self.values not in VALUES:
            raise ValueError(f"values '{self.values}' is unknown; use one of {', '.join(VALUES)}.")
        if isinstance(program, StageFunction):
            raise ValueError("the program has stages; run this pass before cut-stages.")
        if not program.is_local and program.mesh is not None:
            raise ValueError(
                "the program is global; run insert-collectives before offload-activations."
            )
        if any(isinstance(op, HostCopyOp) for op in program.ops):
            raise ValueError("the program is offloaded already; offload it once.")
        if not offload(program, self.values, self.least_bytes, self.bytes):
            note(
                "nothing is offloaded: no block keeps a value for its backward pass that can and "
                "has to be offloaded; capture the step with train=True, give fewer bytes or a "
                "smaller least_bytes, or leave the pass out."
            )
