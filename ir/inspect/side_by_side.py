"""Two programs side by side, by layers: the ops added, removed, moved and changed in each.

Neighbouring layers with the same changes are shown once, by the first of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import Copy, copy_of, layer_of, origin_of, phase_of
from shardweave.ir.inspect.diff import Change, aligned_changes
from shardweave.ir.inspect.diff_table import ProgramTable
from shardweave.ir.inspect.outline import body_of, part_of
from shardweave.ir.program.blocks import Blocks
from shardweave.ir.program.program import Program


class OpPair(NamedTuple):
    """An op before and after a change; None on a side that lacks it. change: None if unchanged."""

    before: Operation | None
    after: Operation | None
    change: Change | None

    @property
    def kind(self) -> str:
        """`same`, or the kind of the change (`Change.kind`)."""
        return "same" if self.change is None else self.change.kind


@dataclass(frozen=True)
class LayerPairs:
    """Neighbouring layers with the same ops and changes. pairs: the op pairs of the first layer.

    members: for each layer, its ops after the change, in order. The ops at one index are equal in
    all layers, except for the layers' names.
    """

    layers: tuple[str, ...]
    pairs: tuple[OpPair, ...]
    members: tuple[tuple[Operation, ...], ...]


def pairs_of(before: ProgramTable, after: ProgramTable) -> tuple[list[OpPair], list[Change]]:
    """Pair the ops of two programs, in one order; also return the changes (`aligned_changes`)."""
    changes, places = aligned_changes(before, after)
    sides = list(before.program.ops), list(after.program.ops)
    known = {change.at: change for change in changes if change.at != (None, None)}
    pairs = [
        OpPair(
            None if at[0] is None else sides[0][at[0]],
            None if at[1] is None else sides[1][at[1]],
            known.get(at),
        )
        for at in places
    ]
    return pairs, changes


def unchanged(program: Program) -> list[OpPair]:
    return [OpPair(op, op, None) for op in program.ops]


def by_layers(pairs: Sequence[OpPair], blocks: Blocks) -> list[LayerPairs]:
    """Group op pairs by layer, and equal neighbouring layers. Takes time linear in the ops."""
    parts: dict[str, list[OpPair]] = {}
    for pair in pairs:
        op = pair.after or pair.before
        assert op is not None
        parts.setdefault(part_of(layer_of(op), blocks), []).append(pair)
    grouped: list[LayerPairs] = []
    for _, group in groupby(parts.items(), key=lambda part: _body(*part)):
        layers = list(group)
        members = tuple(
            tuple(pair.after for pair in rows if pair.after is not None) for _, rows in layers
        )
        grouped.append(LayerPairs(tuple(name for name, _ in layers), tuple(layers[0][1]), members))
    return grouped


def _body(name: str, pairs: Sequence[OpPair]) -> tuple[object, ...]:
    """Return a key that is equal for layers with the same ops and the same changes."""
    sides = [pair.before for pair in pairs], [pair.after for pair in pairs]
    bodies = [body_of(name, [op for op in side if op is not None]) for side in sides]
    kinds = [(pair.kind, pair.before is None, pair.after is None) for pair in pairs]
    return kinds, *bodies


def ancestors_of(pairs: Sequence[OpPair]) -> dict[Operation, Operation]:
    """Map each op after a change to the op before the change from which it comes.

    An op that exists once per sub-batch has no partner in the diff. It is matched by name, layer
    and phase, and by its position among such ops of its sub-batch.
    """
    ancestors: dict[Operation, Operation] = {}
    for pair in pairs:
        if pair.after is not None and pair.before is not None:
            ancestors[pair.after] = pair.before
    shared = {ancestors[op] for op in ancestors if copy_of(op) is None}
    single = [pair.before for pair in pairs if pair.before is not None]
    varying = [op for op in single if op not in shared and copy_of(op) is None]
    originals = {key: op for key, op in _numbered(varying)}
    copies = [p.after for p in pairs if p.after is not None and copy_of(p.after) is not None]
    for key, op in _numbered(copies):
        if op not in ancestors and key in originals:
            ancestors[op] = originals[key]
    return ancestors


def same_by_name(before: Program, after: Program) -> dict[Operation, Operation]:
    """Map each op of `after`, which is a part of `before`, to the op of `before` with the same
    names. Ops with the same names are matched in order, if both programs have equally many."""
    known: defaultdict[object, list[Operation]] = defaultdict(list)
    for op in before.ops:
        known[_names(op)].append(op)
    cut: defaultdict[object, list[Operation]] = defaultdict(list)
    for op in after.ops:
        cut[_names(op)].append(op)
    partners: dict[Operation, Operation] = {}
    for key, ops in cut.items():
        if len(ops) == len(known[key]):
            partners.update(zip(ops, known[key], strict=True))
    return partners


def _names(op: Operation) -> object:
    hints = tuple(result.name_hint for result in op.results)
    return op.name, layer_of(op), phase_of(op), copy_of(op), hints


def _numbered(ops: Iterable[Operation]) -> Iterator[tuple[object, Operation]]:
    """Yield each op with a key: name, layer, phase, and its count within its sub-batch."""
    counts: Counter[object] = Counter()
    for op in ops:
        kind, copy = (op.name, layer_of(op), phase_of(op)), copy_of(op)
        yield (kind, counts[kind, copy]), op
        counts[kind, copy] += 1


def sources_of(program: Program) -> dict[Operation, Operation]:
    """Map each recomputed op to the op that it was cloned from, if the program still has it."""
    named: dict[tuple[str, str, Copy | None], Operation] = {}
    recomputed: list[tuple[str, Operation]] = []
    for op in program.ops:
        origin = origin_of(op)
        if origin is not None:
            recomputed.append((origin, op))
            continue
        for result in op.results:
            if result.name_hint is not None:
                named.setdefault((result.name_hint, layer_of(op), copy_of(op)), op)
    sources: dict[Operation, Operation] = {}
    for origin, op in recomputed:
        source = named.get((origin, layer_of(op), copy_of(op)))
        if source is not None:
            sources[op] = source
    return sources
