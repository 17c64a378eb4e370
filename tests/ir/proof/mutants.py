"""Programs with one slip in them, and which ops a message about it should name."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xdsl.dialects import func
from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import describe
from shardweave.ir.dialects.kernel import FusedOp, YieldOp
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import HELD, StageFunction, functions_of, is_staged, parts_of
from shardweave.ir.proof.stages.stages import RETURNED
from shardweave.tests.ir.proof import value_slips
from shardweave.tests.ir.proof.slips import SLIPS
from shardweave.tests.ir.proof.stage_slips import STAGE_SLIPS

assert value_slips, "which adds its kinds"

KINDS = (*SLIPS, *STAGE_SLIPS)

Name = tuple[str, ...]
"""Texts that all stand in a message that names an op: what it is, and of a program of stages its
function."""


@dataclass(frozen=True)
class Mutant:
    """A program with a slip. names: of the ops that it is in, and of those that read their results
    (as messages and views bring them)."""

    kind: str
    program: Program
    names: frozenset[Name]

    def is_named_in(self, message: str) -> bool:
        """Whether a message names one of these ops."""
        return any(all(text in message for text in name) for name in self.names)


def mutant(program: Program, kind: str, seed: int) -> Mutant | None:
    """The program with a slip of a kind at a place that the seed chooses; None if it has none.

    Ops are told from each other by the names of their values: see `distinct`.
    """
    rng, copy = random.Random(seed), program.clone()
    before = Snapshot(copy)
    if kind in STAGE_SLIPS:
        is_made = is_staged(copy) and STAGE_SLIPS[kind](copy, rng)
    else:
        parts = parts_of(copy)
        is_made = any(SLIPS[kind](part, rng) for part in rng.sample(parts, len(parts)))
    return Mutant(kind, copy, before.names_of_changes(copy)) if is_made else None


def distinct(program: Program) -> Program:
    """The program with a name of its own for each value, so that messages tell ops apart."""
    number = 0
    for part in functions(program):
        for op in part.function.walk():
            for result in op.results:
                result.name_hint = f"{result.name_hint or 'v'}.n{number}"
                number += 1
    return program


def functions(program: Program) -> list[Program]:
    """All functions of a program, the step among them."""
    return [program, *parts_of(program)] if is_staged(program) else [program]


def ops_within(part: Program) -> Iterator[Operation]:
    """The ops of a function, those of regions among them, and its return."""
    return (op for op in part.function.walk() if not isinstance(op, func.FuncOp))


@dataclass(frozen=True)
class Was:
    """An op before a slip. names: how messages name it."""

    operands: tuple[SSAValue, ...]
    properties: dict[str, Attribute]
    names: set[Name]


class Snapshot:
    """The ops and slots of a program before a slip, to tell what it changed."""

    def __init__(self, program: Program) -> None:
        self.order = [list(ops_within(part)) for part in functions(program)]
        self.ops = {
            op: Was(tuple(op.operands), dict(op.properties), names_of(op, part))
            for part, ops in zip(functions(program), self.order, strict=True)
            for op in ops
        }
        self.slots = [_slots(part) for part in functions(program)]

    def names_of_changes(self, program: Program) -> frozenset[Name]:
        """The names of the ops and slots at fault, and of those that read what they give."""
        found: set[Name] = set()
        readers, left = Readers(program), set(self.ops)
        for part, order, slots in zip(functions(program), self.order, self.slots, strict=True):
            ops = list(ops_within(part))
            left.difference_update(ops)
            moved = _moved(order, ops)
            for op in ops:
                found |= self._names(op, part, readers, op is moved)
            for old, new in zip(slots, _slots(part), strict=True):
                if (old.kind, old.name) != (new.kind, new.name):
                    found |= {_slot_name(old, part), _slot_name(new, part)}
                    found |= set(readers.names(new.value))
        return frozenset(found.union(*(self.ops[op].names for op in left)))

    def _names(self, op: Operation, part: Program, readers: Readers, is_moved: bool) -> set[Name]:
        was = self.ops.get(op)
        before = was.operands if was else ()
        changed = {
            index: self._is_reader(old, new)
            for index, (old, new) in enumerate(zip(before, op.operands, strict=False))
            if old is not new
        }
        if isinstance(op, func.ReturnOp | YieldOp | FusedOp | dist.SendOp) and changed:
            onward = [readers.names_of_use(op, index, set()) for index in changed]
            return set().union(*onward)
        is_changed = was is None or was.properties != op.properties
        if is_moved or is_changed or not all(changed.values()) or (changed and _moves(op)):
            names = names_of(op, part) | (was.names if was else set())
            return names.union(*(readers.names(result) for result in op.results))
        return names_of(op, part) if changed else set()

    def _is_reader(self, old: SSAValue, new: SSAValue) -> bool:
        """Whether who reads a new value reads that of the op at fault: of one that was put in, or
        of one that is left out."""
        if isinstance(new.owner, Operation) and new.owner not in self.ops:
            return True
        was = self.ops.get(old.owner) if isinstance(old.owner, Operation) else None
        if was is None:
            return False
        owners = [v.owner for v in was.operands if isinstance(v.owner, Operation)]
        starts = [self.ops[owner].operands for owner in owners if owner in self.ops]
        return new in was.operands or any(new in operands for operands in starts)


def _moved(before: list[Operation], after: list[Operation]) -> Operation | None:
    """The op that stands elsewhere, if one does."""
    there = set(after)
    was = [op for op in before if op in there]
    there = set(was)
    now = [op for op in after if op in there]
    return next((b for a, b in zip(was, now, strict=True) if a is not b), None)


class Readers:
    """Who reads a value of a program, in other functions and regions too."""

    def __init__(self, program: Program) -> None:
        self.parts = {part.function: part for part in functions(program)}
        self.links: dict[tuple[int, str], list[SSAValue]] = {}
        """By stage and name of a message or a slot, where it is read."""
        for function in functions_of(program).values() if is_staged(program) else ():
            for op in function.ops:
                if isinstance(op, dist.RecvOp):
                    self._add(function, op.message, op.results[0])
            for slot in function.arguments:
                if slot.kind in HELD:
                    self._add(function, slot.name, slot.value)

    def _add(self, function: StageFunction, name: str, value: SSAValue) -> None:
        self.links.setdefault((function.stage, name), []).append(value)

    def names(self, value: SSAValue, seen: set[SSAValue] | None = None) -> Iterator[Name]:
        """The names of the ops that read a value."""
        seen = set() if seen is None else seen
        if value in seen:
            return
        seen.add(value)
        for use in value.uses:
            yield from self.names_of_use(use.operation, use.index, seen)

    def names_of_use(self, op: Operation, index: int, seen: set[SSAValue]) -> Iterator[Name]:
        """The names of an op that reads a value as some operand, and of those to which it goes."""
        onward: Iterable[SSAValue] = ()
        if isinstance(op, FusedOp):
            onward = [op.block.args[index]]
        elif isinstance(op, YieldOp):
            owner = op.parent_op()
            onward = [owner.results[index]] if isinstance(owner, FusedOp) else ()
        elif isinstance(op, func.ReturnOp):
            part = self._part(op)
            slot = part.results[index]
            yield _slot_name(slot, part)
            if isinstance(part, StageFunction) and slot.kind in HELD:
                onward = self.links.get((part.stage, slot.name), ())
        elif isinstance(op, dist.SendOp):
            yield from names_of(op, self._part(op))
            onward = self.links.get((op.to, op.message), ())
        else:
            yield from names_of(op, self._part(op))
            onward = op.results if _moves(op) else ()
        for value in onward:
            yield from self.names(value, seen)

    def _part(self, op: Operation) -> Program:
        owner: Operation | None = op
        while not isinstance(owner, func.FuncOp):
            assert owner is not None
            owner = owner.parent_op()
        return self.parts[owner]


def _moves(op: Operation) -> bool:
    """Whether an op only brings elements elsewhere: a message, a view, a part of a bucket."""
    is_part = op.name in ("aten.slice.Tensor", "aten.cat")
    return isinstance(op, dist.DistOp) or spec_of(op).is_rearrangement or is_part


def _slots(part: Program) -> list[Slot]:
    return [*part.arguments, *part.results]


def _slot_name(slot: Slot, part: Program) -> Name:
    """How messages name a slot: with its function, unless it is one of the step's results."""
    within = () if slot.kind in RETURNED else _function_name(part)
    return (f"{slot.kind} '{slot.name}'", *within)


def _function_name(part: Program) -> Name:
    return (f"@{part.name}",) if isinstance(part, StageFunction) else ()


def names_of(op: Operation, part: Program) -> set[Name]:
    """How messages name an op."""
    within = _function_name(part)
    if isinstance(op, dist.RunOp):
        return {(f"@{op.function}",)}
    if isinstance(op, dist.SendOp) and isinstance(part, StageFunction):
        waited = (f"receives message '{op.message}'", f"function of stage {part.stage} ")
        return {waited, (f"'{op.message}'", *within)}
    if isinstance(op, dist.RecvOp):
        return {(f"'{op.message}'", *within)}
    return {(describe(op).split(" at ")[0], *within)}
