"""How two programs differ: by operand structure, and in what they do.

`diff_match` says which op is which; this file says what of it is a change. Names and places of
values do not count. A value that a new op stands in front of, or that a removed op does not
stand in front of any more, is part of that op's change, not one of its users' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.annotations import layer_of, phase_of
from shardweave.ir.blocks import Blocks
from shardweave.ir.inspect.diff_lines import Lines
from shardweave.ir.inspect.diff_match import Matching, longest_increasing, match
from shardweave.ir.inspect.diff_table import NOT_COMPARED, Interner, ProgramTable, table_of
from shardweave.ir.inspect.stats import stats
from shardweave.ir.program import Program, Slot
from shardweave.ir.program_stats import ProgramStats
from shardweave.ir.text import without_gc

MAX_CHAIN = 256
"""How many new (or removed) ops are looked through for what stands behind them."""

Value = tuple[int, int]


@dataclass(frozen=True)
class Detail:
    """One thing that changed of an op that stays: `what` is a property, "type", "operand 0", ...

    before, after: as a person reads them; "" where there is nothing. general: the same without
    names of values, equal for the same change in another layer.
    """

    what: str
    before: str
    after: str
    general: tuple[str, str]


@dataclass(frozen=True)
class Change:
    """One op (or argument, result, mesh) that differs.

    kind: "added", "removed", "moved" or "changed" (which may also have moved). op: its name;
    layer, phase: where it belongs. before, after: its line in the first and second program, ""
    where it is not. at: its places among the ops of both programs, None where it is not. hunk:
    changes that stand next to each other have the same number.
    """

    kind: str
    op: str
    layer: str
    phase: str
    before: str
    after: str
    at: tuple[int | None, int | None]
    details: tuple[Detail, ...]
    hunk: int = 0

    def signature(self, blocks: Blocks) -> Hashable:
        """Equal for the same change of the same op in another layer."""
        details = tuple((d.what, d.general) for d in self.details)
        return self.kind, self.op, self.phase, _within_block(self.layer, blocks), details


@dataclass(frozen=True)
class ChangeGroup:
    """The same changes in one or many layers. `changes` are those of the first of `blocks`.

    A block is a layer of the model with all that is in it (`h.3`), or one module outside them.
    """

    blocks: tuple[str, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class StructuralDiff:
    """All changes from the first program to the second, in order, and the numbers of both.

    blocks: the repeated blocks of either.
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
        """The changes by layer, layers with the same changes folded into one group."""
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
    """What has to change in `a` to get `b`. The complexity is that of `diff_match`."""
    interner = Interner()
    with without_gc():
        mine, others = table_of(a, interner), table_of(b, interner)
        changes = tuple(_Comparison(match(mine, others)).changes())
    num_ops = mine.num_ops, others.num_ops
    return StructuralDiff(changes, (stats(a), stats(b)), num_ops, mine.blocks | others.blocks)


class _Comparison:
    """Two programs whose ops are matched."""

    def __init__(self, matching: Matching) -> None:
        self.matching = matching
        self.a = matching.a
        self.b = matching.b
        self.lines = Lines(self.a.program), Lines(self.b.program)
        self.behind: tuple[dict[Value, frozenset[Value]], dict[Value, frozenset[Value]]] = {}, {}

    def changes(self) -> Iterator[Change]:
        yield from self._mesh()
        yield from self._slots()
        yield from self._ops()

    # Ops

    def _ops(self) -> Iterator[Change]:
        """The changes of ops in an order that both programs can be read in."""
        pairs = self.matching.pairs
        stays = self._fixed()
        hunk, was_same = 0, True
        for node, other in self._merged(stays):
            same = None
            if node is None:
                same = self._one_sided("added", other)
            elif other is None:
                same = self._one_sided("removed", node)
            elif pairs.get(node) == other:
                same = self._pair(node, other, moved=node not in stays)
            if same is not None and was_same:
                hunk += 1
            was_same = same is None
            if same is not None:
                yield replace(same, hunk=hunk)

    def _fixed(self) -> set[int]:
        """Nodes of the first program that keep their order: as many as can be."""
        first = self.a.num_arguments
        pairs = sorted(pair for pair in self.matching.pairs.items() if pair[0] >= first)
        return {pairs[i][0] for i in longest_increasing([other for _, other in pairs])}

    def _merged(self, fixed: set[int]) -> Iterator[tuple[int | None, int | None]]:
        """Pairs (node, other) in one order: removed ops where they stood, moved where they are."""
        a, b, pairs, back = self.a, self.b, self.matching.pairs, self.matching.back

        def removed(node: int) -> Iterator[tuple[int, None]]:
            """Those from a node up to the next one that keeps its order."""
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

    def _one_sided(self, kind: str, node: int | None) -> Change:
        assert node is not None
        is_new = kind == "added"
        table = self.b if is_new else self.a
        op = table.op(node)
        line, place = self.lines[is_new].line(op), node - table.num_arguments
        return Change(
            kind=kind,
            op=op.name,
            layer=layer_of(op),
            phase=phase_of(op),
            before="" if is_new else line,
            after=line if is_new else "",
            at=(None, place) if is_new else (place, None),
            details=(),
        )

    def _pair(self, node: int, other: int, *, moved: bool) -> Change | None:
        details: list[Detail] = []
        if self.a.full[node] != self.b.full[other]:
            details += _own_details(self.a.op(node), self.b.op(other))
        details += self._operand_details(node, other)
        if not details and not moved:
            return None
        op = self.b.op(other)
        at = node - self.a.num_arguments, other - self.b.num_arguments
        if moved and details:
            details.append(Detail("place", str(at[0]), str(at[1]), ("", "")))
        return Change(
            kind="changed" if details else "moved",
            op=op.name,
            layer=layer_of(op),
            phase=phase_of(op),
            before=self.lines[0].line(self.a.op(node)),
            after=self.lines[1].line(op),
            at=at,
            details=tuple(details),
        )

    def _operand_details(self, node: int, other: int) -> Iterator[Detail]:
        mine, others = self.a.operands[node], self.b.operands[other]
        if len(mine) != len(others):
            sources = self._names(0, mine), self._names(1, others)
            kinds = _general(self.a, mine), _general(self.b, others)
            yield Detail("operands", *sources, (", ".join(kinds[0]), ", ".join(kinds[1])))
            return
        for index, (value, new) in enumerate(zip(mine, others, strict=True)):
            if not self._is_same_value(value, new):
                names = self._names(0, [value]), self._names(1, [new])
                kinds = _general(self.a, [value])[0], _general(self.b, [new])[0]
                yield Detail(f"operand {index}", *names, kinds)

    def _is_same_value(self, value: Value, new: Value) -> bool:
        """Whether a value is the other, or only new or removed ops stand between them."""
        partner = self.matching.pairs.get(value[0])
        if partner is not None and (partner, value[1]) == new:
            return True
        if partner is not None and new[0] in self.matching.back:
            return False
        return not self._behind(0, value).isdisjoint(self._behind(1, new))

    def _behind(self, side: int, value: Value) -> frozenset[Value]:
        """The matched values, as those of the second program, that a value is made of.

        Empty if there are too many ops in between to say.
        """
        known = self.behind[side].get(value)
        if known is not None:
            return known
        table = (self.a, self.b)[side]
        pairs = (self.matching.pairs, self.matching.back)[side]
        found: set[Value] = set()
        seen = {value}
        queue = [value]
        while queue and len(seen) <= MAX_CHAIN:
            node, result = queue.pop()
            partner = pairs.get(node)
            if partner is not None:
                found.add((partner if side == 0 else node, result))
                continue
            sources = [source for source in table.operands[node] if source not in seen]
            seen.update(sources)
            queue += sources
        known = self.behind[side][value] = frozenset() if queue else frozenset(found)
        return known

    def _names(self, side: int, values: Sequence[Value]) -> str:
        table = (self.a, self.b)[side]
        return ", ".join(self.lines[side].name(_ssa(table, value)) for value in values)

    # What is around the ops

    def _mesh(self) -> Iterator[Change]:
        modules = self.a.program.module, self.b.program.module
        details = _attribute_details(modules[0].attributes, modules[1].attributes)
        if details:
            yield Change("changed", "builtin.module", "", "module", "", "", (None, None), details)

    def _slots(self) -> Iterator[Change]:
        arguments = [
            {key: table.argument_slots[node] for key, node in table.arguments.items()}
            for table in (self.a, self.b)
        ]
        yield from self._slot_changes("argument", *arguments)
        yield from self._slot_changes("result", self.a.results, self.b.results)

    def _slot_changes(
        self, word: str, mine: dict[tuple[str, str], Slot], others: dict[tuple[str, str], Slot]
    ) -> Iterator[Change]:
        for key in dict.fromkeys([*mine, *others]):
            old, new = mine.get(key), others.get(key)
            details: list[Detail] = []
            if old is not None and new is not None:
                details += _slot_details(old, new)
                if word == "result":
                    details += self._returned(key)
                elif old.value.type != new.value.type:
                    details.append(_plain("type", str(old.value.type), str(new.value.type)))
                if not details:
                    continue
            kind = "added" if old is None else "removed" if new is None else "changed"
            yield Change(
                kind=kind,
                op=f"{word} {key[0]} '{key[1].rpartition('.')[2]}'",
                layer=key[1].rpartition(".")[0],
                phase=f"{word}s",
                before="" if old is None else _slot_line(old),
                after="" if new is None else _slot_line(new),
                at=(None, None),
                details=tuple(details),
            )

    def _returned(self, key: tuple[str, str]) -> Iterator[Detail]:
        value, new = self.a.returned[key], self.b.returned[key]
        if not self._is_same_value(value, new):
            names = self._names(0, [value]), self._names(1, [new])
            yield Detail(
                "value", *names, (_general(self.a, [value])[0], _general(self.b, [new])[0])
            )


def _ssa(table: ProgramTable, value: Value) -> SSAValue:
    node, result = value
    op = table.ops[node]
    return table.argument_slots[node].value if op is None else op.results[result]


def _general(table: ProgramTable, values: Sequence[Value]) -> list[str]:
    """What values are, without their names: the op that makes them, or the argument's kind."""
    found: list[str] = []
    for node, result in values:
        op = table.ops[node]
        if op is None:
            slot = table.argument_slots[node]
            found.append(f"{slot.kind} {_within_block(slot.name, table.blocks)}")
        else:
            found.append(
                f"{op.name} {result} {_within_block(layer_of(op), table.blocks)} {phase_of(op)}"
            )
    return found


def _own_details(old: Operation, new: Operation) -> list[Detail]:
    """What differs of two ops beside their operands."""
    details: list[Detail] = []
    if old.name != new.name:
        details.append(_plain("op", old.name, new.name))
    details += _attribute_details(old.properties, new.properties)
    types = [", ".join(str(r.type) for r in op.results) for op in (old, new)]
    if types[0] != types[1]:
        details.append(_plain("type", *types))
    if not details:
        details.append(_plain("region", "...", "..."))
    return details


def _attribute_details(old: dict[str, Attribute], new: dict[str, Attribute]) -> tuple[Detail, ...]:
    return tuple(
        _plain(name, _text(old.get(name)), _text(new.get(name)))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    )


def _slot_details(old: Slot, new: Slot) -> list[Detail]:
    data = [
        {name: value for name, value in slot.attributes.data.items() if name not in NOT_COMPARED}
        for slot in (old, new)
    ]
    return list(_attribute_details(*data))


def _plain(what: str, before: str, after: str) -> Detail:
    return Detail(what.removeprefix("dist."), before, after, (before, after))


def _text(attribute: Attribute | None) -> str:
    return "" if attribute is None else str(attribute)


def _slot_line(slot: Slot) -> str:
    return f"%{slot.value.name_hint or '?'}: {slot.value.type} {slot.attributes}"


def _within_block(layer: str, blocks: Blocks) -> str:
    """A layer's name with the number of its block left out."""
    block = blocks.of_layer(layer)
    return layer if block is None else f"{_family(block)}{layer[len(block) :]}"


def _family(block: str) -> str:
    """`h.*` of `h.3`."""
    return f"{block.rpartition('.')[0]}.*"


def blocks_text(blocks: tuple[str, ...]) -> str:
    """`h.0 … h.95` for a run of numbers, else the names; the root has none."""
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
    """How many changes of each kind there are, for the kinds that there are."""
    return dict(Counter(change.kind for change in diff.changes))
