"""Match the ops of one program with those of another, by structure.

Names and positions of values do not count. Each unmatched op has two hashes: `up`, of its label and
the hashes of its operands, and `down`, of its label and the hashes of its users; matched ops
contribute a fixed hash to both. Ops that agree in both hashes, or are the only ones with one of
them, are matched, and the rest is hashed again until no more match. The label is first everything
but the operands, then name, layer and phase, looking through collectives (this finds changed ops),
then the name alone. Remaining ops, whose surroundings all changed, are aligned as sequences between
matched ones.

A new op changes `up` of its dependents and `down` of the ops that it depends on, so that one change
leaves every other op one hash to match by. Each round takes time linear in the unmatched ops and
their operands, and every round except the last of its kind matches some; the alignment takes
O(n log n). In practice there are a handful of rounds, on ever fewer ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from shardweave.ir.inspect.diff_table import ProgramTable, Value

MAX_ROUNDS = 12
"""Limit on rounds of one kind; each except the last matches some ops."""

MAX_EXACT = 10_000
"""Limit on the product of two sequences' lengths for an exact alignment."""

Labels = Callable[[ProgramTable], list[int]]
Hash = int | tuple[int, int]


class Matching:
    """Matched nodes of two tables. partners: for each table, maps its nodes to the other's."""

    def __init__(self, a: ProgramTable, b: ProgramTable) -> None:
        self.tables = a, b
        self.partners: tuple[dict[int, int], dict[int, int]] = {}, {}

    def add(self, node: int, other: int) -> None:
        self.partners[0][node] = other
        self.partners[1][other] = node

    def unmatched(self) -> list[list[int]]:
        """For each of the two programs, its ops' nodes without a partner in the other, in order."""
        return [
            [n for n in range(table.num_arguments, len(table.ops)) if n not in known]
            for table, known in zip(self.tables, self.partners, strict=True)
        ]

    def in_order(self) -> list[tuple[int, int]]:
        """The longest list of matched pairs of ops with the same order in both programs."""
        first = self.tables[0].num_arguments
        pairs = sorted(pair for pair in self.partners[0].items() if pair[0] >= first)
        return [pairs[i] for i in longest_increasing([other for _, other in pairs])]


def match(a: ProgramTable, b: ProgramTable) -> Matching:
    """Match the arguments of two programs by kind and name, and their ops by structure."""
    matching = Matching(a, b)
    others = {key: node for node, key in enumerate(b.arguments)}
    for node, key in enumerate(a.arguments):
        if key in others:
            matching.add(node, others[key])
    _match_by_hash(matching, lambda t: t.full)
    _match_by_hash(matching, lambda t: t.weak, looks_through=True)
    _match_by_hash(matching, lambda t: t.weak)
    _align(matching)
    _match_by_hash(matching, lambda t: t.weak)
    _match_by_hash(matching, lambda t: t.bare)
    return matching


def longest_increasing(values: Sequence[int]) -> list[int]:
    """Indices of a longest strictly increasing subsequence. O(n log n)."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, value in enumerate(values):
        at = bisect_left(tails, value)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(value)
            ends.append(index)
        else:
            tails[at], ends[at] = value, index
    indices: list[int] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        indices.append(index)
        index = before[index]
    return indices[::-1]


# By hash


def _match_by_hash(matching: Matching, labels: Labels, *, looks_through: bool = False) -> None:
    for _ in range(MAX_ROUNDS):
        nodes = matching.unmatched()
        if not all(nodes):
            return
        sides = [_Side(matching, side, labels, looks_through) for side in (0, 1)]
        ups = [side.up(own) for side, own in zip(sides, nodes, strict=True)]
        downs = [side.down(own) for side, own in zip(sides, nodes, strict=True)]
        both = [{n: (up[n], down[n]) for n in up} for up, down in zip(ups, downs, strict=True)]
        before = len(matching.partners[0])
        _pair(matching, sides, both, only_single=False)
        _pair(matching, sides, ups, only_single=True)
        _pair(matching, sides, downs, only_single=True)
        if len(matching.partners[0]) == before:
            return


def _pair(
    matching: Matching,
    sides: Sequence[_Side],
    hashes: Sequence[Mapping[int, Hash]],
    *,
    only_single: bool,
) -> None:
    """Pair in order the nodes of each hash that both sides have equally often (or just once)."""
    groups: defaultdict[Hash, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, side in enumerate(sides):
        for node, key in hashes[index].items():
            if node not in matching.partners[index] and not side.is_through(node):
                groups[key][index].append(node)
    for mine, others in groups.values():
        if len(mine) == len(others) and (len(mine) == 1 or not only_single):
            for node, other in zip(mine, others, strict=True):
                matching.add(node, other)


class _Side:
    """Hashes of one program's unmatched ops, computed from fixed hashes of the matched ops."""

    def __init__(self, matching: Matching, side: int, labels: Labels, looks_through: bool) -> None:
        self.table = table = matching.tables[side]
        self.labels = labels(table)
        self.looks_through = looks_through
        # The same for both nodes of a pair, and for an argument without a partner its own.
        self.seeds = {n: (other if side else n) for n, other in matching.partners[side].items()}
        for node in range(table.num_arguments):
            self.seeds.setdefault(node, (1 << 40) + 2 * node + side)

    def is_through(self, node: int) -> bool:
        """True if hashes take the i-th result of this node, an op of dialect dist, for its i-th
        operand."""
        return (
            self.looks_through
            and bool(self.table.operands[node])
            and self.table.op(node).name.startswith("dist.")
        )

    def up(self, nodes: list[int]) -> dict[int, int]:
        """Hash each unmatched node by its label and its operands."""
        hashes: dict[int, int] = {}
        through: dict[Value, int] = {}
        seeds = self.seeds
        for node in nodes:
            parts = [self.labels[node]]
            for source, result in self.table.operands[node]:
                known = through.get((source, result))
                if known is None:
                    origin = seeds.get(source)
                    known = hash((hashes[source] if origin is None else origin, result))
                parts.append(known)
            hashes[node] = hash(tuple(parts))
            if self.is_through(node):
                through.update(((node, i), known) for i, known in enumerate(parts[1:]))
        return hashes

    def down(self, nodes: list[int]) -> dict[int, int]:
        """Hash each unmatched node by its label and the ops that use its results."""
        table, seeds = self.table, self.seeds
        hashes: dict[int, int] = {}
        values: dict[Value, int] = defaultdict(int)
        for key, slot in table.results.items():
            values[table.where[slot.value]] += hash(key)
        for node in reversed(nodes):
            for user, operand, result in table.uses[node]:
                seed = seeds.get(user)
                if seed is None and self.is_through(user):
                    values[node, result] += values.get((user, operand), 0)
                else:
                    values[node, result] += hash((hashes[user] if seed is None else seed, operand))
            results = range(len(table.op(node).results))
            hashes[node] = hash((self.labels[node], *(values.get((node, i), 0) for i in results)))
        return hashes


# As sequences


def _align(matching: Matching) -> None:
    """Align the unmatched ops between matched ops that have the same order on both sides."""
    nodes = matching.unmatched()
    if not all(nodes):
        return
    starts = list(zip(*matching.in_order(), strict=True)) or [(), ()]
    gaps: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side in (0, 1):
        for node in nodes[side]:
            gaps[bisect_left(starts[side], node)][side].append(node)
    for mine, others in gaps.values():
        _align_run(matching, mine, others)


def _align_run(matching: Matching, left: list[int], right: list[int]) -> None:
    """Pair nodes of equal weak label in order. As many as possible if nodes are few."""
    a, b = (table.weak for table in matching.tables)
    if len(left) * len(right) <= MAX_EXACT:
        for i, j in _common([a[n] for n in left], [b[n] for n in right]):
            matching.add(left[i], right[j])
        return
    places = _occurrences(a, left), _occurrences(b, right)
    both = [(i, places[1][key]) for key, i in places[0].items() if key in places[1]]
    fixed = [both[k] for k in longest_increasing([j for _, j in both])]
    previous = (-1, -1)
    for i, j in [*fixed, (len(left), len(right))]:
        mine, others = left[previous[0] + 1 : i], right[previous[1] + 1 : j]
        if fixed and mine and others:
            _align_run(matching, mine, others)
        if i < len(left):
            matching.add(left[i], right[j])
        previous = i, j


def _occurrences(labels: list[int], nodes: list[int]) -> dict[tuple[int, int], int]:
    counts: defaultdict[int, int] = defaultdict(int)
    occurrences: dict[tuple[int, int], int] = {}
    for place, node in enumerate(nodes):
        label = labels[node]
        occurrences[label, counts[label]] = place
        counts[label] += 1
    return occurrences


def _common(left: list[int], right: list[int]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence: the longest run of matches that increases."""
    matches = [
        (i, j)
        for i, label in enumerate(left)
        for j in reversed(range(len(right)))
        if right[j] == label
    ]
    return [matches[k] for k in longest_increasing([j for _, j in matches])]
