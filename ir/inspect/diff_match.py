"""Which op of one program is which op of another, by structure.

Neither names nor places of values count. Each op that is not matched yet has two hashes: `up`,
of what it is and of the hashes of its operands, and `down`, of what it is and of the hashes of
its users; what is matched already stands for itself in both. Ops that agree in both, or alone
in one of them, are matched, and the rest is hashed anew until nothing more is found: first with
everything that an op is, then looking through collectives and with the op's name, layer and
phase alone (which finds changed ops), then with its name alone. Ops whose surroundings all
changed are aligned, between those that are matched, as sequences.

An op that is new changes `up` of all that depends on it but `down` of all that it depends on,
so that one change leaves a match for every other op. Each round is linear in the unmatched ops
and their operands, and every round but the last of its kind matches something; the alignment
takes O(n log n). In practice a handful of rounds is taken, on ever fewer ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from shardweave.ir.inspect.diff_table import ProgramTable

MAX_ROUNDS = 12
"""Of one kind; each but the last matches something."""

MAX_EXACT = 10_000
"""Largest product of two sequences' lengths that are aligned by the exact quadratic way."""

Labels = Callable[[ProgramTable], list[int]]
Value = tuple[int, int]
Hash = int | tuple[int, int]


class Matching:
    """Pairs of nodes of two tables. `pairs` maps nodes of `a` to those of `b`."""

    def __init__(self, a: ProgramTable, b: ProgramTable) -> None:
        self.a = a
        self.b = b
        self.pairs: dict[int, int] = {}
        self.back: dict[int, int] = {}

    def add(self, node: int, other: int) -> None:
        self.pairs[node] = other
        self.back[other] = node

    def unmatched(self) -> tuple[list[int], list[int]]:
        """Nodes of ops without a partner, in order."""
        a, b = self.a, self.b
        return (
            [n for n in range(a.num_arguments, len(a.ops)) if n not in self.pairs],
            [n for n in range(b.num_arguments, len(b.ops)) if n not in self.back],
        )


def match(a: ProgramTable, b: ProgramTable) -> Matching:
    """Match the arguments by kind and name, and the ops by structure."""
    found = Matching(a, b)
    for key, node in a.arguments.items():
        if key in b.arguments:
            found.add(node, b.arguments[key])
    _match_by_hash(found, lambda t: t.full)
    _match_by_hash(found, lambda t: t.weak, looks_through=True)
    _match_by_hash(found, lambda t: t.weak)
    _align(found)
    _match_by_hash(found, lambda t: t.weak)
    _match_by_hash(found, lambda t: t.bare)
    return found


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
    found: list[int] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        found.append(index)
        index = before[index]
    return found[::-1]


# By hash


def _match_by_hash(found: Matching, labels: Labels, *, looks_through: bool = False) -> None:
    for _ in range(MAX_ROUNDS):
        left, right = found.unmatched()
        if not left or not right or not _round(found, left, right, labels, looks_through):
            return


def _round(
    found: Matching, left: list[int], right: list[int], labels: Labels, looks_through: bool
) -> bool:
    """Match what the hashes say; returns whether that is anything."""
    sides = (
        _Side(found.a, labels(found.a), _seeds(found.a, found.pairs, 0), looks_through),
        _Side(found.b, labels(found.b), _seeds(found.b, found.back, 1), looks_through),
    )
    ups = sides[0].up(left), sides[1].up(right)
    downs = sides[0].down(left), sides[1].down(right)
    if looks_through:
        left = [n for n in left if not sides[0].is_through(n)]
        right = [n for n in right if not sides[1].is_through(n)]
    before = len(found.pairs)
    _pair(found, left, right, lambda side, n: (ups[side][n], downs[side][n]), only_single=False)
    for hashes in (ups, downs):
        left = [n for n in left if n not in found.pairs]
        right = [n for n in right if n not in found.back]
        _pair(found, left, right, lambda side, n, of=hashes: of[side][n], only_single=True)
    return len(found.pairs) > before


def _pair(
    found: Matching,
    left: Iterable[int],
    right: Iterable[int],
    key: Callable[[int, int], Hash],
    *,
    only_single: bool,
) -> None:
    """Pair nodes of equal key in order, where both sides have as many (or one) of it."""
    groups: defaultdict[Hash, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, nodes in enumerate((left, right)):
        for node in nodes:
            groups[key(side, node)][side].append(node)
    for mine, others in groups.values():
        if len(mine) == len(others) and (len(mine) == 1 or not only_single):
            for node, other in zip(mine, others, strict=True):
                found.add(node, other)


def _seeds(table: ProgramTable, pairs: dict[int, int], side: int) -> dict[int, int]:
    """What stands for a matched node, the same on both sides, and for an argument that is not."""
    seeds = {n: (other if side else n) for n, other in pairs.items()}
    for node in range(table.num_arguments):
        seeds.setdefault(node, (1 << 40) + 2 * node + side)
    return seeds


class _Side:
    """The hashes of one program's unmatched ops, where matched ones are their seeds."""

    def __init__(
        self, table: ProgramTable, labels: list[int], seeds: dict[int, int], looks_through: bool
    ) -> None:
        self.table = table
        self.labels = labels
        self.seeds = seeds
        self.looks_through = looks_through

    def is_through(self, node: int) -> bool:
        """Whether the node is left out, its results standing for its operands, one by one."""
        return (
            self.looks_through
            and bool(self.table.operands[node])
            and self.table.op(node).name.startswith("dist.")
        )

    def up(self, nodes: list[int]) -> dict[int, int]:
        """By unmatched node, the hash of what it is and what it reads."""
        found: dict[int, int] = {}
        through: dict[Value, int] = {}
        seeds = self.seeds
        for node in nodes:
            parts = [self.labels[node]]
            for source, result in self.table.operands[node]:
                known = through.get((source, result))
                if known is None:
                    origin = seeds.get(source)
                    known = hash((found[source] if origin is None else origin, result))
                parts.append(known)
            found[node] = hash(tuple(parts))
            if self.is_through(node):
                through.update(((node, i), known) for i, known in enumerate(parts[1:]))
        return found

    def down(self, nodes: list[int]) -> dict[int, int]:
        """By unmatched node, the hash of what it is and what is made of its results."""
        table, seeds = self.table, self.seeds
        found: dict[int, int] = {}
        values: dict[Value, int] = defaultdict(int)
        for key, value in table.returned.items():
            values[value] += hash(key)
        for node in reversed(nodes):
            for user, operand, result in table.uses[node]:
                seed = seeds.get(user)
                if seed is None and self.is_through(user):
                    values[node, result] += values.get((user, operand), 0)
                else:
                    values[node, result] += hash((found[user] if seed is None else seed, operand))
            results = range(len(table.op(node).results))
            found[node] = hash((self.labels[node], *(values.get((node, i), 0) for i in results)))
        return found


# As sequences


def _align(found: Matching) -> None:
    """Align what is unmatched between matched ops that are in the same order on both sides."""
    left, right = found.unmatched()
    if not left or not right:
        return
    for mine, others in _gaps(found, left, right):
        _align_run(found, mine, others)


def _gaps(
    found: Matching, left: list[int], right: list[int]
) -> Iterable[tuple[list[int], list[int]]]:
    """The unmatched nodes on both sides of each gap between fixed pairs."""
    first = found.a.num_arguments
    pairs = sorted(pair for pair in found.pairs.items() if pair[0] >= first)
    fixed = [pairs[i] for i in longest_increasing([other for _, other in pairs])]
    starts = [a for a, _ in fixed], [b for _, b in fixed]
    gaps: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, nodes in enumerate((left, right)):
        for node in nodes:
            gaps[bisect_left(starts[side], node)][side].append(node)
    return (gap for gap in gaps.values() if gap[0] and gap[1])


def _align_run(found: Matching, left: list[int], right: list[int]) -> None:
    """Pair nodes of equal weak label in order: as many as can be if there are few, else many."""
    if len(left) * len(right) <= MAX_EXACT:
        for i, j in _common([found.a.weak[n] for n in left], [found.b.weak[n] for n in right]):
            found.add(left[i], right[j])
        return
    places = _occurrences(found.a.weak, left), _occurrences(found.b.weak, right)
    both = [(i, places[1][key]) for key, i in places[0].items() if key in places[1]]
    fixed = [both[k] for k in longest_increasing([j for _, j in both])]
    previous = (-1, -1)
    for i, j in [*fixed, (len(left), len(right))]:
        mine, others = left[previous[0] + 1 : i], right[previous[1] + 1 : j]
        if fixed and mine and others:
            _align_run(found, mine, others)
        if i < len(left):
            found.add(left[i], right[j])
        previous = i, j


def _occurrences(labels: list[int], nodes: list[int]) -> dict[tuple[int, int], int]:
    """The place of the k-th node of each label, by (label, k)."""
    counts: defaultdict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], int] = {}
    for place, node in enumerate(nodes):
        label = labels[node]
        found[label, counts[label]] = place
        counts[label] += 1
    return found


def _common(left: list[int], right: list[int]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence. Quadratic."""
    width = len(right) + 1
    lengths = [[0] * width for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        row, below, label = lengths[i], lengths[i + 1], left[i]
        for j in range(width - 2, -1, -1):
            row[j] = below[j + 1] + 1 if label == right[j] else max(below[j], row[j + 1])
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return found
