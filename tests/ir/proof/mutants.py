"""Programs with one slip in them, and which ops a message about it should name."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xdsl.dialects import func
from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir import dist
from shardweave.ir.annotations import describe
from shardweave.ir.facts import facts_of
from shardweave.ir.kernel import FusedOp, YieldOp
from shardweave.ir.program import Program, Slot
from shardweave.ir.staged import HELD, StageFunction, functions_of, is_staged, parts_of
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
    for part in _functions(program):
        for op in part.function.walk():
            for result in op.results:
                result.name_hint = f"{result.name_hint or 'v'}.n{number}"
                number += 1
    return program


def _functions(program: Program) -> list[Program]:
    return [program, *parts_of(program)] if is_staged(program) else [program]


@dataclass(frozen=True)
class Was:
    """An op before a slip. name: how messages name it."""

    operands: tuple[SSAValue, ...]
    properties: dict[str, Attribute]
    name: Name


class Snapshot:
    """The ops and slots of a program before a slip, to tell what it changed."""

    def __init__(self, program: Program) -> None:
        self.ops = {
            op: Was(tuple(op.operands), dict(op.properties), _name(op, part))
            for part in _functions(program)
            for op in part.function.walk()
            if not isinstance(op, func.FuncOp)
        }
        self.slots = [_slots(part) for part in _functions(program)]

    def names_of_changes(self, program: Program) -> frozenset[Name]:
        """The names of the ops and slots at fault, and of those that read what they give."""
        found: set[Name] = set()
        readers = Readers(program)
        left = set(self.ops)
        for part, slots in zip(_functions(program), self.slots, strict=True):
            defined = set(part.function.body.block.args)
            for op in part.function.walk():
                if isinstance(op, func.FuncOp):
                    continue
                left.discard(op)
                found |= self._names(op, part, readers, defined)
                defined.update(op.results)
                for region in op.regions:
                    defined.update(region.block.args)
            for old, new in zip(slots, _slots(part), strict=True):
                if (old.kind, old.name, old.value) != (new.kind, new.name, new.value):
                    found |= {_slot_name(old, part), _slot_name(new, part)}
                    found |= set(readers.names(new.value))
        return frozenset(found | {self.ops[op].name for op in left})

    def _names(
        self, op: Operation, part: Program, readers: Readers, defined: set[SSAValue]
    ) -> set[Name]:
        was = self.ops.get(op)
        is_early = any(value not in defined for value in op.operands)
        is_at_fault = was is None or is_early or was.properties != op.properties
        changed = [] if was is None else [
            (index, old, new)
            for index, (old, new) in enumerate(zip(was.operands, op.operands, strict=True))
            if old is not new
        ]  # fmt: skip
        is_at_fault |= any(not self._is_reader(old, new) for _, old, new in changed)
        if isinstance(op, func.ReturnOp):
            results = part.results
            return {_slot_name(results[index], part) for index, _, _ in changed}
        if is_at_fault:
            names = {_name(op, part)} | ({was.name} if was else set())
            return names.union(*(readers.names(result) for result in op.results))
        if changed and (isinstance(op, (FusedOp, YieldOp)) or _moves(op)):
            # It reads another value in place of an op's that is gone: so do those behind it.
            return {_name(op, part)}.union(*(readers.names(result) for result in op.results))
        return {_name(op, part)} if changed else set()

    def _is_reader(self, old: SSAValue, new: SSAValue) -> bool:
        """Whether who reads a new value reads that of the op at fault: of one that was put in, or
        of one that is left out."""
        if isinstance(new.owner, Operation) and new.owner not in self.ops:
            return True
        was = self.ops.get(old.owner) if isinstance(old.owner, Operation) else None
        if was is None:
            return False
        starts = [self.ops[v.owner].operands for v in was.operands if v.owner in self.ops]
        return new in was.operands or any(new in operands for operands in starts)


class Readers:
    """Who reads a value of a program, in other functions and regions too."""

    def __init__(self, program: Program) -> None:
        self.parts = {part.function: part for part in _functions(program)}
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
            yield from self._names_of_use(use.operation, use.index, seen)

    def _names_of_use(self, op: Operation, index: int, seen: set[SSAValue]) -> Iterator[Name]:
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
            yield _name(op, self._part(op))
            onward = self.links.get((op.to, op.message), ())
        else:
            yield _name(op, self._part(op))
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
    return isinstance(op, dist.DistOp) or facts_of(op).is_rearrangement


def _slots(part: Program) -> list[Slot]:
    return [*part.arguments, *part.results]


def _slot_name(slot: Slot, part: Program) -> Name:
    return (f"{slot.kind} '{slot.name}'", *_function_name(part))


def _function_name(part: Program) -> Name:
    return (f"@{part.name}",) if isinstance(part, StageFunction) else ()


def _name(op: Operation, part: Program) -> Name:
    if isinstance(op, dist.RunOp):
        return (f"@{op.function}",)
    if isinstance(op, (dist.SendOp, dist.RecvOp)):
        return (f"'{op.message}'", *_function_name(part))
    return (describe(op).split(" at ")[0], *_function_name(part))
