"""A program as tables of integers, in which `diff_match` looks for equal structure.

Nodes are the arguments and then the ops, in order. Comparing attributes is slow, so each label (all
of an op except its operands) becomes an integer, equal in both programs' tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO

from xdsl.ir import Attribute, Operation, Region, SSAValue
from xdsl.printer import Printer

from shardweave.ir.by_identity import ByIdentity
from shardweave.ir.dialects.annotations import copy_of, layer_of, phase_of
from shardweave.ir.program.blocks import Blocks, blocks_of
from shardweave.ir.program.program import Program, Slot


class Lines:
    """Prints single ops, with values named as in the text of the whole program."""

    def __init__(self, program: Program) -> None:
        self._printer = Printer(stream=StringIO())
        self._names: dict[SSAValue, str] = {}
        # The text names values in the order in which they are defined.
        for slot in program.arguments:
            self._names[slot.value] = self._printer.print_ssa_value(slot.value)
        for op in program.ops:
            for value in op.results:
                self._names[value] = self._printer.print_ssa_value(value)

    def name(self, value: SSAValue) -> str:
        """The value's name, with the leading %."""
        return f"%{self._names[value]}"

    def line(self, op: Operation) -> str:
        """The op as text without indentation: one line, or several for an op with a region."""
        stream = StringIO()
        self._printer.stream = stream
        self._printer.print_op(op)
        return stream.getvalue()


SlotKey = tuple[str, str]
Value = tuple[int, int]
"""A node, and the index of one of its results."""

NOT_COMPARED = frozenset({"dist.kind", "dist.name"})
"""Attributes of slots that only identify the slot."""


@dataclass
class Interner:
    """Maps labels to integers; looks attributes up by identity first, since hashing is slow."""

    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    by_id: ByIdentity[int] = field(default_factory=ByIdentity[int])

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def attribute(self, attribute: Attribute) -> int:
        known = self.by_id.find(id(attribute))
        if known is None:
            known = self.by_id.keep(id(attribute), self.number(attribute), attribute)
        return known


@dataclass(frozen=True)
class ProgramTable:
    """The arguments and ops of a program, by node (an index).

    arguments, results: by kind and name, in order. ops: by node, None for an argument. where: maps
    SSA values to (node, result index). operands: by node. full, weak, bare: by node, labels of
    everything except the operands; of name, layer, phase and copy; of the name alone. uses: by
    node, triples (user node, operand index, result index).
    """

    program: Program
    blocks: Blocks
    arguments: dict[SlotKey, Slot]
    results: dict[SlotKey, Slot]
    ops: list[Operation | None]
    where: dict[SSAValue, Value]
    operands: list[tuple[Value, ...]]
    full: list[int]
    weak: list[int]
    bare: list[int]
    uses: list[list[tuple[int, int, int]]]

    def op(self, node: int) -> Operation:
        """Return the op of a node, which must not be an argument."""
        op = self.ops[node]
        assert op is not None
        return op

    def ssa(self, value: Value) -> SSAValue:
        node, result = value
        op = self.ops[node]
        return self.slots[node].value if op is None else op.results[result]

    @cached_property
    def slots(self) -> list[Slot]:
        """The argument slots, by node."""
        return list(self.arguments.values())

    @property
    def num_arguments(self) -> int:
        return len(self.arguments)

    @property
    def num_ops(self) -> int:
        return len(self.ops) - self.num_arguments


def table_of(program: Program, interner: Interner) -> ProgramTable:
    """Build the table of a program. Takes time linear in its ops."""
    arguments = _by_key(program.arguments)
    count, none = len(arguments), interner.number("argument")
    table = ProgramTable(
        program=program,
        blocks=blocks_of(program),
        arguments=arguments,
        results=_by_key(program.results),
        ops=[None] * count,
        where={slot.value: (node, 0) for node, slot in enumerate(arguments.values())},
        operands=[()] * count,
        full=[none] * count,
        weak=[none] * count,
        bare=[none] * count,
        uses=[[] for _ in arguments],
    )
    for node, op in enumerate(program.ops, start=count):
        table.ops.append(op)
        table.uses.append([])
        reads = tuple([table.where[value] for value in op.operands])
        table.operands.append(reads)
        for index, (source, result) in enumerate(reads):
            table.uses[source].append((node, index, result))
        for index, value in enumerate(op.results):
            table.where[value] = node, index
        table.full.append(interner.number(_label(op, interner)))
        table.weak.append(interner.number((op.name, layer_of(op), phase_of(op), copy_of(op))))
        table.bare.append(interner.number(op.name))
    return table


def _by_key(slots: list[Slot]) -> dict[SlotKey, Slot]:
    """Map slots by kind and name; a slot without a unique name gets its position as name."""
    keyed: dict[SlotKey, Slot] = {}
    for index, slot in enumerate(slots):
        key = slot.kind, slot.name
        keyed[key if slot.name and key not in keyed else (slot.kind, f"#{index}")] = slot
    return keyed


def _label(op: Operation, interner: Interner) -> Hashable:
    number: Callable[[Attribute], int] = interner.attribute
    properties = [(name, number(value)) for name, value in op.properties.items()]
    properties.sort()
    types = [number(result.type) for result in op.results]
    regions = tuple(_region_label(region, interner) for region in op.regions)
    return op.name, tuple(properties), tuple(types), regions


def _region_label(region: Region, interner: Interner) -> Hashable:
    """A hashable description of a region, its values numbered in order of definition."""
    numbers: dict[SSAValue, int] = {}
    parts: list[Hashable] = []
    for block in region.blocks:
        for value in block.args:
            numbers[value] = len(numbers)
        parts.append(tuple(interner.attribute(value.type) for value in block.args))
        for op in block.ops:
            reads = tuple(numbers.get(value, -1) for value in op.operands)
            for value in op.results:
                numbers[value] = len(numbers)
            parts.append((_label(op, interner), reads))
    return tuple(parts)
