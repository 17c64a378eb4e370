"""The differences between two programs, by operand structure.

`diff_match` matches their ops; this file lists the changes. Names and positions of values do not
count. Where an added or removed op only inserts itself between a value and its users, the users
are not listed as changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from xdsl.ir import Attribute, Operation

from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.inspect.diff_match import Matching, match
from shardweave.ir.inspect.diff_table import (
    NOT_COMPARED,
    Interner,
    Lines,
    ProgramTable,
    Value,
    table_of,
)
from shardweave.ir.inspect.stats import stats
from shardweave.ir.program.blocks import Blocks
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.program_stats import ProgramStats
from shardweave.ir.program.text import without_gc

MAX_CHAIN = 256
"""Limit on the added or removed ops to look through for the matched value that feeds them."""


Places = tuple[int | None, int | None]
"""Position of an op in the first and in the second program; None where it is absent."""


@dataclass(frozen=True)
class Detail:
    """One difference between matched ops. what: a property's name, "type", "operand 0", ..

    before, after: both sides as text; "" if absent. general: both sides without names of values, so
    that the same change in another layer compares equal.
    """

    what: str
    before: str
    after: str
    general: tuple[str, str]


@dataclass(frozen=True)
class Change:
    """One op, argument, result or mesh that differs between two programs.

    kind: "added", "removed", "moved" or "changed" (which may also have moved). op: the op's name;
    layer, phase: the op's. before, after: the op's line in the first and second program, "" if
    absent. at: its index among the ops of each program, None if absent. hunk: a number that
    adjacent changes share.
    """

    kind: str
    op: str
    layer: str
    phase: str
    before: str
    after: str
    at: Places
    details: tuple[Detail, ...]
    hunk: int = 0

    def signature(self, blocks: Blocks) -> Hashable:
        """Return a key that is equal for the same change of the same op in another layer."""
        details = tuple((d.what, d.general) for d in self.details)
        return self.kind, self.op, self.phase, _within_block(self.layer, blocks), details


@dataclass(frozen=True)
class ChangeGroup:
    """The same changes in one or many layers. changes: the changes in the first of `blocks`.

    A block is a repeated layer of the model with all its submodules (`h.3`), or a module outside
    these.
    """

    blocks: tuple[str, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class StructuralDiff:
    """All changes from the first program to the second, in order, and statistics of both.

    blocks: the repeated blocks of either program.
    """

    changes: tuple[Change, ...]
    stats: tuple[ProgramStats, ProgramStats]
    num_ops: tuple[int, int]
    blocks: Blocks

    @property
    def num_hunks(self) -> int:
        return len({change.hunk for change in self.changes})

    def count(self, kind: str) -> int:
        return sum(change.kind == kind for change in self.changes)

    def groups(self) -> list[ChangeGroup]:
        """Group the changes by layer, and fold layers with the same changes into one group."""
        blocks: dict[str, list[Change]] = {}
        for change in self.changes:
            name = self.blocks.of_layer(change.layer) or change.layer
            blocks.setdefault(name, []).append(change)
        folded: dict[Hashable, list[str]] = {}
        for block, changes in blocks.items():
            key = tuple(change.signature(self.blocks) for change in changes)
            is_repeated = block in self.blocks.names
            family = _family(block) if is_repeated else block
            folded.setdefault((family, key), []).append(block)
        return [ChangeGroup(tuple(names), tuple(blocks[names[0]])) for names in folded.values()]


def structural_diff(a: Program, b: Program) -> StructuralDiff:
    """List the changes that turn `a` into `b`. Takes about the time of `diff_match`."""
    interner = Interner()
    with without_gc():
        mine, others = table_of(a, interner), table_of(b, interner)
        changes = tuple(_Comparison(match(mine, others)).changes())
    num_ops = mine.num_ops, others.num_ops
    return StructuralDiff(changes, (stats(a), stats(b)), num_ops, mine.blocks | others.blocks)


def aligned_changes(mine: ProgramTable, others: ProgramTable) -> tuple[list[Change], list[Places]]:
    """Return the changes of `structural_diff`, and the ops of both programs in one order, as pairs
    of indices.

    Removed ops keep their old place in this order, moved ops have their new one. `before` and
    `after` of the changes are empty, since most are never read.
    """
    with without_gc():
        comparison = _Comparison(match(mine, others), prints=False)
        return list(comparison.changes()), list(comparison.places())


class _Comparison:
    """Two programs whose ops are matched: side 0 is the first, side 1 the second."""

    def __init__(self, matching: Matching, *, prints: bool = True) -> None:
        self.prints = prints
        self.tables = matching.tables
        self.partners = matching.partners
        self.lines = [Lines(table.program) for table in self.tables]
        self.behind: list[dict[Value, frozenset[Value]]] = [{}, {}]
        self.fixed = {node for node, _ in matching.in_order()}

    def changes(self) -> Iterator[Change]:
        yield from self._mesh()
        for word in ("argument", "result"):
            yield from self._slots(word)
        yield from self._ops()

    # Ops

    def _ops(self) -> Iterator[Change]:
        """Yield the changes of ops in merged order, with hunk numbers."""
        changes = (self._change(*pair, is_fixed=pair[0] in self.fixed) for pair in self._merged())
        hunks = (hunk for differs, hunk in groupby(changes, key=bool) if differs)
        for number, hunk in enumerate(hunks, start=1):
            for change in filter(None, hunk):
                yield replace(change, hunk=number)

    def places(self) -> Iterator[Places]:
        """Yield index pairs of matched ops, in the order of `_merged`; None for an op that only one
        program has."""
        first, second = (table.num_arguments for table in self.tables)
        for node, other in self._merged():
            yield None if node is None else node - first, None if other is None else other - second

    def _merged(self) -> Iterator[Places]:
        """Pairs (node, other) in one order: removed ops where they stood, moved where they are."""
        (a, b), (pairs, back), fixed = self.tables, self.partners, self.fixed

        def removed(node: int) -> Iterator[tuple[int, None]]:
            """Yield the removed nodes from `node` up to the next node that has not moved."""
            while node < len(a.ops) and node not in fixed:
                if node not in pairs:
                    yield node, None
                node += 1

        yield from removed(a.num_arguments)
        for other in range(b.num_arguments, len(b.ops)):
            node = back.get(other)
            yield node, other
            if node in fixed:
                yield from removed(node + 1)

    def _change(self, node: int | None, other: int | None, *, is_fixed: bool) -> Change | None:
        """Describe how an op changed, by its nodes in both programs; None if it did not."""
        details: list[Detail] = []
        if node is None or other is None:
            kind = "added" if node is None else "removed"
        else:
            details += self._details(node, other)
            if not details and is_fixed:
                return None
            kind = "changed" if details else "moved"
        sides = list(zip(self.tables, self.lines, (node, other), strict=True))
        before, after = (
            "" if n is None or not self.prints else lines.line(table.op(n))
            for table, lines, n in sides
        )
        places = [None if n is None else n - table.num_arguments for table, _, n in sides]
        if details and not is_fixed:
            details.append(Detail("place", str(places[0]), str(places[1]), ("", "")))
        op = next(table.op(n) for table, _, n in reversed(sides) if n is not None)
        at = places[0], places[1]
        return Change(kind, op.name, layer_of(op), phase_of(op), before, after, at, tuple(details))

    def _details(self, node: int, other: int) -> Iterator[Detail]:
        if self.tables[0].full[node] != self.tables[1].full[other]:
            yield from _own_details(self.tables[0].op(node), self.tables[1].op(other))
        yield from self._operand_details(node, other)

    def _operand_details(self, node: int, other: int) -> Iterator[Detail]:
        mine, others = self.tables[0].operands[node], self.tables[1].operands[other]
        if len(mine) != len(others):
            yield self._detail("operands", mine, others)
            return
        for index, (value, new) in enumerate(zip(mine, others, strict=True)):
            if not self._is_same_value(value, new):
                yield self._detail(f"operand {index}", [value], [new])

    def _detail(self, what: str, values: Sequence[Value], news: Sequence[Value]) -> Detail:
        """Return the detail that the operands `values` were replaced by `news`."""
        names: list[str] = []
        general: list[str] = []
        for table, lines, side in zip(self.tables, self.lines, (values, news), strict=True):
            names.append(", ".join(lines.name(table.ssa(value)) for value in side))
            general.append(", ".join(_general(table, value) for value in side))
        return Detail(what, names[0], names[1], (general[0], general[1]))

    def _is_same_value(self, value: Value, new: Value) -> bool:
        """True if two values match, directly or looking through added and removed ops."""
        partner = self.partners[0].get(value[0])
        if partner is not None and (partner, value[1]) == new:
            return True
        if partner is not None and new[0] in self.partners[1]:
            return False
        return not self._behind(0, value).isdisjoint(self._behind(1, new))

    def _behind(self, side: int, value: Value) -> frozenset[Value]:
        """Find the matched values that feed a value, in the second program; empty if too far."""
        known = self.behind[side].get(value)
        if known is not None:
            return known
        matched: set[Value] = set()
        seen = {value}
        queue = [value]
        while queue and len(seen) <= MAX_CHAIN:
            node, result = queue.pop()
            partner = self.partners[side].get(node)
            if partner is not None:
                matched.add((partner if side == 0 else node, result))
                continue
            sources = [v for v in self.tables[side].operands[node] if v not in seen]
            seen.update(sources)
            queue += sources
        known = self.behind[side][value] = frozenset() if queue else frozenset(matched)
        return known

    # What is around the ops

    def _mesh(self) -> Iterator[Change]:
        old, new = (table.program.module.attributes for table in self.tables)
        details = tuple(_attribute_details(old, new))
        if details:
            yield Change("changed", "builtin.module", "", "module", "", "", (None, None), details)

    def _slots(self, word: str) -> Iterator[Change]:
        """Yield the changes of arguments or results, as `word` says."""
        mine, others = (t.arguments if word == "argument" else t.results for t in self.tables)
        for key in dict.fromkeys([*mine, *others]):
            old, new = mine.get(key), others.get(key)
            details: list[Detail] = []
            if old is not None and new is not None:
                details += self._slot_details(word, old, new)
                if not details:
                    continue
            kind = "added" if old is None else "removed" if new is None else "changed"
            layer, _, name = key[1].rpartition(".")
            before, after = ("" if slot is None else _slot_line(slot) for slot in (old, new))
            op, at = f"{word} {key[0]} '{name}'", (None, None)
            yield Change(kind, op, layer, f"{word}s", before, after, at, tuple(details))

    def _slot_details(self, word: str, old: Slot, new: Slot) -> Iterator[Detail]:
        data = [
            {
                name: value
                for name, value in slot.attributes.data.items()
                if name not in NOT_COMPARED
            }
            for slot in (old, new)
        ]
        yield from _attribute_details(*data)
        if word == "argument":
            if old.value.type != new.value.type:
                yield _plain("type", str(old.value.type), str(new.value.type))
            return
        value, other = self.tables[0].where[old.value], self.tables[1].where[new.value]
        if not self._is_same_value(value, other):
            yield self._detail("value", [value], [other])


def _general(table: ProgramTable, value: Value) -> str:
    node, result = value
    op = table.ops[node]
    if op is None:
        slot = table.slots[node]
        return f"{slot.kind} {_within_block(slot.name, table.blocks)}"
    return f"{op.name} {result} {_within_block(layer_of(op), table.blocks)} {phase_of(op)}"


def _own_details(old: Operation, new: Operation) -> list[Detail]:
    """Yield the differences between two matched ops, other than their operands."""
    details = [_plain("op", old.name, new.name)] if old.name != new.name else []
    details += _attribute_details(old.properties, new.properties)
    types = [", ".join(str(r.type) for r in op.results) for op in (old, new)]
    if types[0] != types[1]:
        details.append(_plain("type", *types))
    return details or [_plain("region", "...", "...")]


def _attribute_details(
    old: Mapping[str, Attribute], new: Mapping[str, Attribute]
) -> Iterator[Detail]:
    for name in dict.fromkeys([*old, *new]):
        values = old.get(name), new.get(name)
        if values[0] != values[1]:
            yield _plain(name, *("" if value is None else str(value) for value in values))


def _plain(what: str, before: str, after: str) -> Detail:
    return Detail(what.removeprefix("dist."), before, after, (before, after))


def _slot_line(slot: Slot) -> str:
    return f"%{slot.value.name_hint or '?'}: {slot.value.type} {slot.attributes}"


def _within_block(layer: str, blocks: Blocks) -> str:
    """Return a layer's name without the number of its repeated block."""
    block = blocks.of_layer(layer)
    return layer if block is None else f"{_family(block)}{layer[len(block) :]}"


def _family(block: str) -> str:
    """`h.*` of `h.3`."""
    return f"{block.rpartition('.')[0]}.*"


def blocks_text(blocks: tuple[str, ...]) -> str:
    """Describe blocks: `h.0 … h.95` for consecutive numbers, else names; '' is outside layers."""
    if len(blocks) == 1:
        return blocks[0] or "outside the layers"
    prefix = blocks[0].rpartition(".")[0]
    ends = [block.rpartition(".")[2] for block in blocks]
    if not all(end.isdigit() for end in ends):
        return ", ".join(blocks)
    numbers = sorted(map(int, ends))
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{prefix}.{numbers[0]} … {prefix}.{numbers[-1]}"
    return ", ".join(f"{prefix}.{number}" for number in numbers)


def count_by_kind(diff: StructuralDiff) -> dict[str, int]:
    """Count the changes of each kind that occurs."""
    return dict(Counter(change.kind for change in diff.changes))
