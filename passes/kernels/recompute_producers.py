"""Recomputing cheap values in each kernel that reads them, where that moves fewer bytes.

A value that one kernel writes and another reads moves its bytes twice. If it can be computed,
element by element, from values that are in memory anyway, the reader may compute it: a loss's log
probabilities from the logits and two numbers per row, a gate's activation from its input, a widened
copy from the narrow original, rows of a table, labels shifted by one. (Inductor does this between
forward and backward by a minimal cut; here kernels are known, and readers in the same phase, or
after a product or a collective, are considered too.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import phase_of, set_origin, set_phase
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.dialects.kernel import escaping_values
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, tensor_type_of
from shardweave.ir.ops.fusible import MAX_OPS, MAX_VALUES, role_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import layout_source
from shardweave.passes.kernels.fuse_kernels import Growth, Unit, keys_of_ops
from shardweave.passes.kernels.unfuse_kernels import require_no_regions
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

LAUNCH_BYTES = 1 << 20
"""Bytes that saving one kernel is worth: a GPU moves more in the 2 us that a launch takes."""


def _compute_masks_early(program: Program) -> None:
    """Move masks and small integer ops before the first op with their key (`keys_of_ops`), if their
    operands exist there. A kernel that reads such a mask can then run before a library call that
    reads another of its results, even if the mask was computed after that call."""
    places: dict[Operation, float] = {op: place for place, op in enumerate(program.ops)}
    begins: dict[tuple[object, ...], Operation] = {}
    for op, key in list(keys_of_ops(program)):
        if isinstance(op, DistOp):
            continue
        begin = begins.setdefault(key, op)
        makers = [maker for value in op.operands if (maker := _owner_of(value)) is not None]
        is_there = all(places[maker] < places[begin] for maker in makers)
        if op is not begin and is_there and _is_small_mask(op):
            op.detach()
            Rewriter.insert_op(op, InsertPoint.before(begin))
            places[op] = places[begin] - 0.5


def _is_small_mask(op: Operation) -> bool:
    is_moved = role_of(op) in ("pointwise", "view")
    return is_moved and all(
        not dtype_of_value(value).is_floating_point and _bytes(value) <= LAUNCH_BYTES
        for value in op.results
    )


@dataclass
class _Reading:
    """A read of a value, or of a view of it, by an op as operand `index`."""

    op: Operation
    index: int


@dataclass
class _Recomputed:
    """A value to recompute by the ops of `chain` from the values `stored`, which are in memory."""

    value: SSAValue
    readers: dict[Unit, list[_Reading]]
    stored: set[SSAValue] = field(default_factory=lambda: set[SSAValue]())
    chain: set[Operation] = field(default_factory=lambda: set[Operation]())
    saved_bytes: int = 0

    def read_bytes(self, source: SSAValue) -> int:
        """Bytes of `source` that a unit reads; of a table, at most the bytes of rows looked up."""
        lookups = [op for op in self.chain if spec_of(op).is_lookup]
        tables = {layout_source(op.operands[0]): op.results[0] for op in lookups}
        taken = tables.get(source)
        return _bytes(source) if taken is None else min(_bytes(source), _bytes(taken))

    def carry_out(self, growth: Growth, places: dict[Operation, int]) -> int:
        """Insert clones before each unit that reads the value; return the number of clones."""
        count = 0
        for unit, readings in self.readers.items():
            first = min((reading.op for reading in readings), key=places.__getitem__)
            begin = min(unit.ops, key=places.__getitem__)
            if self._known_after(places) < places[begin]:
                first = begin
            cloning = _Cloning(self.stored, first)
            for reading in readings:
                reading.op.operands[reading.index] = cloning.of(reading.op.operands[reading.index])
            for clone in cloning.made:
                places[clone] = places[first]
                unit.ops[clone] = places[first]
                growth.units[clone] = unit
            count += len(cloning.made)
        return count

    def _known_after(self, places: dict[Operation, int]) -> int:
        """The place of the last op outside the chain whose result the chain reads; -1 if none."""
        makers = (_owner_of(operand) for op in self.chain for operand in op.operands)
        outside = [maker for maker in makers if maker is not None and maker not in self.chain]
        return max((places[maker] for maker in outside), default=-1)


class _Cloning:
    """Clones ops of a chain, and inserts the clones before one op."""

    def __init__(self, stored: set[SSAValue], before: Operation) -> None:
        self.stored = stored
        self.before = before
        self.made: list[Operation] = []
        self._known: dict[SSAValue, SSAValue] = {}

    def of(self, value: SSAValue) -> SSAValue:
        """Return the clone of a value, made at the first call; or the value itself, if it or the
        value that it views is read from memory."""
        owner = value.owner
        if layout_source(value) in self.stored or not isinstance(owner, Operation):
            return value
        if value not in self._known:
            operands = {operand: self.of(operand) for operand in owner.operands}
            clone = owner.clone_without_regions(operands)
            set_phase(clone, phase_of(self.before))
            hint = owner.results[0].name_hint
            if hint is not None:
                set_origin(clone, hint)
            Rewriter.insert_op(clone, InsertPoint.before(self.before))
            self.made.append(clone)
            self._known.update(zip(owner.results, clone.results, strict=True))
        return self._known[value]


def _plan_for(value: SSAValue, growth: Growth) -> _Recomputed | None:
    """Plan to recompute a value in all kernels that read it, with the bytes that this saves. None
    if other ops than kernels read the value, or a kernel would become too large."""
    owner = _owner_of(value)
    home = None if owner is None else growth.units.get(owner)
    readers: dict[Unit, list[_Reading]] = {}
    for reading in _readings(value):
        unit = growth.units.get(reading.op)
        if unit is None or any(spec_of(op).role == "matmul" for op in unit.ops):
            return None
        if unit is not home:
            readers.setdefault(unit, []).append(reading)
    if not readers or home is None:
        return None
    plan = _Recomputed(value, readers)
    newly_stored = _walk(value, home, plan)
    if not all(_fits(unit, plan) for unit in readers):
        return None
    size = _bytes(value)
    plan.saved_bytes = size * (1 + len(readers)) - sum(map(_bytes, newly_stored))
    if plan.chain >= home.ops.keys():
        plan.saved_bytes += LAUNCH_BYTES
    elif any(role_of(op) == "move" for op in plan.chain):
        return None  # moves of elements are recomputed only if that saves a kernel
    for unit in readers:
        known = _inputs_of(unit)
        plan.saved_bytes -= sum(plan.read_bytes(s) for s in plan.stored if s not in known)
    return plan


def _is_cheap(op: Operation) -> bool:
    """True if an op computes each element in a few instructions from its operands' elements."""
    return role_of(op) in ("pointwise", "move") and spec_of(op).costly != "trigonometric"


def _readings(value: SSAValue) -> Iterator[_Reading]:
    pending = [value]
    while pending:
        for use in pending.pop().uses:
            if spec_of(use.operation).is_layout:
                pending += use.operation.results
            else:
                yield _Reading(use.operation, use.index)


def _walk(value: SSAValue, home: Unit, plan: _Recomputed) -> set[SSAValue]:
    """Fill in `plan.chain` and `plan.stored`; returns the values that only the plan stores."""
    newly_stored: set[SSAValue] = set()
    pending = [value]
    while pending:
        owner = _owner_of(pending.pop())
        if owner is None or owner in plan.chain:
            continue
        plan.chain.add(owner)
        for operand in owner.operands:
            source = layout_source(operand)
            maker = _owner_of(source)
            is_inside = maker is not None and maker in home.ops
            if maker is not None and is_inside and not _escapes(source, home):
                if _is_cheap(maker):
                    pending.append(source)
                    continue
                newly_stored.add(source)
            plan.stored.add(source)
    return newly_stored


def _escapes(value: SSAValue, home: Unit) -> bool:
    return any(reading.op not in home.ops for reading in _readings(value))


def _fits(unit: Unit, plan: _Recomputed) -> bool:
    """True if a kernel stays within its limits with up to two clones of each recomputed op."""
    inputs = _inputs_of(unit) | plan.stored
    num_results = len(escaping_values(unit.ops))
    fits = len(inputs) + num_results <= MAX_VALUES
    return fits and len(unit.ops) + 2 * len(plan.chain) <= MAX_OPS


def _inputs_of(unit: Unit) -> set[SSAValue]:
    sources = {layout_source(v) for op in unit.ops for v in op.operands}
    return {source for source in sources if source.owner not in unit.ops}


def _owner_of(value: SSAValue) -> Operation | None:
    return value.owner if isinstance(value.owner, Operation) else None


def _bytes(value: SSAValue) -> int:
    return num_bytes(tensor_type_of(value))


@dataclass(frozen=True)
class RecomputeProducersPass(PassOnProgram):
    """Recompute values inside the kernels that read them, where that saves bytes or a kernel.

    If only kernels read a value, and it follows element by element from values in memory, each
    reader computes it: also readers in another phase, or beyond a message or product, which no
    region crosses. Set `matmul=false` here if `fuse-kernels`, which runs next, has it.

    Requires: a verified program without regions. Ensures: numerics unchanged, bit for bit, op by
    op; the regions that `fuse-kernels` then makes with the same option move no more bytes than
    before, except up to a MiB for each kernel saved.
    """

    name = "recompute-producers"
    matmul: bool = True

    def run(self, program: Program) -> None:
        require_no_regions(program)
        _compute_masks_early(program)
        growth = Growth(program, matmul=self.matmul)
        growth.grow()
        places = {op: place for place, op in enumerate(program.ops)}
        count = 0
        # In order, so that what is recomputed from another value sees whether that is stored.
        for op in list(program.ops):
            if _is_cheap(op) and op in growth.units:
                plan = _plan_for(op.results[0], growth)
                if plan is not None and plan.saved_bytes > 0:
                    count += plan.carry_out(growth, places)
        remove_dead_ops(program)
        if not count:
            note("no value between kernels is cheaper to recompute than read; leave the pass out.")
