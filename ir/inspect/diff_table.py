"""A program as tables of numbers, in which `diff_match` looks for equal structure.

Nodes are the arguments and then the ops, in order. Comparing two attributes is slow, so each
label (what an op is, without its operands) becomes a number, the same in both tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from xdsl.ir import Attribute, Operation, Region, SSAValue

from shardweave.ir.annotations import copy_of, layer_of, phase_of
from shardweave.ir.blocks import Blocks, blocks_of
from shardweave.ir.program import Program, Slot

SlotKey = tuple[str, str]

NOT_COMPARED = frozenset({"dist.kind", "dist.name"})
"""Attributes of slots that say which slot it is."""


@dataclass
class Interner:
    """Numbers for labels. Attributes are looked up by identity first: hashing one is slow."""

    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    by_id: dict[int, tuple[Attribute, int]] = field(
        default_factory=dict[int, tuple[Attribute, int]]
    )

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def attribute(self, attribute: Attribute) -> int:
        known = self.by_id.get(id(attribute))
        if known is None:
            # Holding the attribute keeps its id from being given to another one.
            known = self.by_id[id(attribute)] = attribute, self.number(attribute)
        return known[1]


@dataclass(frozen=True)
class ProgramTable:
    """The arguments and ops of a program.

    ops: by node, None for an argument. operands: by node, pairs (node, result index).
    full: by node, a number for everything but the operands. weak: one for name, layer, phase
    and copy. bare: one for the name. uses: by node, triples (user node, operand index, result
    index). returned: by result slot, the pair that it returns.
    """

    program: Program
    blocks: Blocks
    ops: list[Operation | None]
    operands: list[tuple[tuple[int, int], ...]]
    full: list[int]
    weak: list[int]
    bare: list[int]
    uses: list[list[tuple[int, int, int]]]
    arguments: dict[SlotKey, int]
    results: dict[SlotKey, Slot]
    argument_slots: list[Slot]
    returned: dict[SlotKey, tuple[int, int]]

    def op(self, node: int) -> Operation:
        """The op of a node that is none of the arguments."""
        found = self.ops[node]
        assert found is not None
        return found

    @property
    def num_arguments(self) -> int:
        return len(self.argument_slots)

    @property
    def num_ops(self) -> int:
        return len(self.ops) - self.num_arguments


def table_of(program: Program, interner: Interner) -> ProgramTable:
    """The table of a program. Linear in its ops."""
    slots = program.arguments
    where: dict[SSAValue, tuple[int, int]] = {s.value: (i, 0) for i, s in enumerate(slots)}
    ops: list[Operation | None] = [None] * len(slots)
    operands: list[tuple[tuple[int, int], ...]] = [()] * len(slots)
    none = interner.number("argument")
    full, weak, bare = [none] * len(slots), [none] * len(slots), [none] * len(slots)
    uses: list[list[tuple[int, int, int]]] = [[] for _ in slots]
    for op in program.ops:
        node = len(ops)
        ops.append(op)
        uses.append([])
        reads = tuple([where[value] for value in op.operands])
        operands.append(reads)
        for index, (source, result) in enumerate(reads):
            uses[source].append((node, index, result))
        for index, value in enumerate(op.results):
            where[value] = node, index
        full.append(interner.number(_label(op, interner)))
        weak.append(interner.number((op.name, layer_of(op), phase_of(op), copy_of(op))))
        bare.append(interner.number(op.name))
    results = _by_key(program.results)
    return ProgramTable(
        program=program,
        blocks=blocks_of(program),
        ops=ops,
        operands=operands,
        full=full,
        weak=weak,
        bare=bare,
        uses=uses,
        arguments={key: where[slot.value][0] for key, slot in _by_key(slots).items()},
        results=results,
        argument_slots=slots,
        returned={key: where[slot.value] for key, slot in results.items()},
    )


def _by_key(slots: list[Slot]) -> dict[SlotKey, Slot]:
    """By kind and name; a slot without a name of its own goes by its place."""
    found: dict[SlotKey, Slot] = {}
    for index, slot in enumerate(slots):
        key = slot.kind, slot.name
        found[key if slot.name and key not in found else (slot.kind, f"#{index}")] = slot
    return found


def _label(op: Operation, interner: Interner) -> Hashable:
    number: Callable[[Attribute], int] = interner.attribute
    properties = [(name, number(value)) for name, value in op.properties.items()]
    properties.sort()
    types = [number(result.type) for result in op.results]
    regions = tuple(_region_label(region, interner) for region in op.regions)
    return op.name, tuple(properties), tuple(types), regions


def _region_label(region: Region, interner: Interner) -> Hashable:
    """What a region is, its values numbered as they are defined."""
    numbers: dict[SSAValue, int] = {}
    found: list[Hashable] = []
    for block in region.blocks:
        for value in block.args:
            numbers[value] = len(numbers)
        found.append(tuple(interner.attribute(value.type) for value in block.args))
        for op in block.ops:
            reads = tuple(numbers.get(value, -1) for value in op.operands)
            for value in op.results:
                numbers[value] = len(numbers)
            found.append((_label(op, interner), reads))
    return tuple(found)
