"""One function of a program as data of the page: its layers, and the changes in them.

Only the first of several equal layers has rows. A value of another one is referred to by the row
of its counterpart in the first, and the name of its own layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import FileLineColLoc
from xdsl.ir import Operation, SSAValue

from shardweave.driver.report.shardings import Picture, sharding_svg
from shardweave.ir.dialects.annotations import sharding_attrs_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.inspect.diff_table import Lines, ProgramTable
from shardweave.ir.inspect.side_by_side import LayerPairs, sources_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Slot, shardings_of


@dataclass
class Words:
    """Table of texts that gives each distinct text an index, in order of first use."""

    _numbers: dict[str, int] = field(default_factory=dict[str, int])

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


KINDS = ("same", "added", "removed", "moved", "changed")
"""Kinds of change of an op; the page's data has their indices."""

NOWHERE = -1
"""Placeholder for the index of a missing row or text."""

SlotKey = tuple[str, str, str]
"""Key of an argument or result: "return" for a result (else ""), kind, name."""

SlotLine = tuple[str, str]

Json = dict[str, Any]


@dataclass(frozen=True)
class Seat:
    """The row of an op on the page. layer: the op's own layer, if the row shows an equal one."""

    row: int
    layer: str = ""


class FunctionPart:
    """A function of a program compared with its earlier version; `data` returns the page's data.

    before: the earlier version, if there was one. first_row: index of its first row among the rows
    of its moment.
    """

    def __init__(
        self,
        name: str,
        table: ProgramTable,
        layers: Sequence[LayerPairs],
        before: FunctionPart | None,
        words: Words,
        first_row: int,
    ) -> None:
        self.name = name
        self.table = table
        self.program = table.program
        self.layers = layers
        self.before = before
        self.words = words
        self.lines = Lines(self.program)
        self.seats = _seats(layers, first_row)
        self.num_rows = sum(len(layer.pairs) for layer in layers)
        self._known_pictures: dict[tuple[tuple[int, ...], str], int] = {}

    def rows_of(self, ancestors: Mapping[Operation, Operation]) -> dict[Operation, int]:
        """Map each op of a later moment to its ancestor's row. ancestors: ops of this moment."""
        return {op: self.seats[ancestor].row for op, ancestor in ancestors.items()}

    def data(self, back: Mapping[Operation, int]) -> Json:
        """Return the page's data. back: for each op, the row of its ancestor a moment before."""
        sources = sources_of(self.program)
        return {
            "name": self.name,
            "sections": [self._section(layer, back, sources) for layer in self.layers],
            "slots": self._slots(),
            "uses": self._uses(),
            "away": self._away(),
        }

    def _section(
        self,
        layer: LayerPairs,
        back: Mapping[Operation, int],
        sources: Mapping[Operation, Operation],
    ) -> Json:
        """A layer's data as columns, which compress better; sparse columns are dicts by row."""
        pairs = layer.pairs
        after = dict(enumerate(pair.after for pair in pairs))
        there = {index: op for index, op in after.items() if op is not None}
        pictures = {index: self._pictures(op) for index, op in there.items()}
        return {
            "layers": list(layer.layers),
            "kinds": [KINDS.index(pair.kind) for pair in pairs],
            "before": [self._text(pair.before, is_before=True) for pair in pairs],
            "after": [self._text(pair.after) for pair in pairs],
            "back": [back.get(op, NOWHERE) if op else NOWHERE for op in after.values()],
            "details": {
                index: [
                    [d.what, self.words.number(d.before), self.words.number(d.after)]
                    for d in pair.change.details
                ]
                for index, pair in enumerate(pairs)
                if pair.change is not None and pair.change.details
            },
            "pictures": {index: known for index, known in pictures.items() if known},
            "origins": {
                index: self._reference(self.seats[sources[op]])
                for index, op in there.items()
                if op in sources
            },
            "places": [
                self.words.number(_source_line(op)) if op else NOWHERE for op in after.values()
            ],
        }

    def _text(self, op: Operation | None, *, is_before: bool = False) -> int:
        if op is None:
            return NOWHERE
        lines = self.before.lines if is_before and self.before is not None else self.lines
        return self.words.number(lines.line(op))

    # Shards

    def _pictures(self, op: Operation) -> list[int]:
        """Index of the picture of each result's sharding; [] if the op has no shardings."""
        attributes = sharding_attrs_of(op)
        mesh = self.program.mesh
        if attributes is None or mesh is None or mesh.num_devices == 1:
            return []
        numbers: list[int] = []
        pairs = zip(op.results, shardings_of(op, self.program), attributes, strict=True)
        for result, sharding, attribute in pairs:
            assert sharding is not None
            numbers.append(self._picture(result, sharding, attribute, mesh))
        return numbers

    def _picture(
        self, value: SSAValue, sharding: Sharding, attribute: ShardingAttr | None, mesh: Mesh
    ) -> int:
        shape = shape_of(value)
        whole = sharding.global_shape(shape) if self.program.is_local else shape
        if not whole or attribute is None:
            return NOWHERE
        text = str(attribute).removeprefix("#dist.sharding")[1:-1]
        if (whole, text) in self._known_pictures:
            return self._known_pictures[whole, text]
        # Sub-batches run in turn on the same devices.
        on_devices = sharding.without(mesh.time_names) if mesh.time_names else sharding
        svg = sharding_svg(Picture((), whole, text, on_devices), mesh.within_stage)
        number = self._known_pictures[whole, text] = self.words.number(svg)
        return number

    # Arguments and results

    def slots(self) -> dict[SlotKey, SlotLine]:
        """Map each argument and result to its line, and to a key for comparison (no names)."""
        slots: dict[SlotKey, SlotLine] = {}
        groups = {"": self.program.arguments, "return": self.program.results}
        for word, group in groups.items():
            for index, slot in enumerate(group):
                said = f"{_notes(slot)} : {slot.value.type}"
                value, head = self.lines.name(slot.value), f'{slot.kind} "{slot.name}"'
                line = f"return.{head} ({value}){said}" if word else f"{value} = {head}{said}"
                slots[word, slot.kind, slot.name or f"#{index}"] = line, said
        return slots

    def _slots(self) -> Json:
        new = self.slots()
        old = new if self.before is None else self.before.slots()
        # Those of the program come first, as its own slots do.
        keys = list(dict.fromkeys([*new, *old]))
        sides = [[table.get(key) for key in keys] for table in (old, new)]
        numbers = [
            [NOWHERE if slot is None else self.words.number(slot[0]) for slot in side]
            for side in sides
        ]
        kinds = [_slot_kind(*pair) for pair in zip(*sides, strict=True)]
        pictures = {
            str(index): [self._slot_picture(slot)]
            for index, slot in enumerate((*self.program.arguments, *self.program.results))
        }
        return {"kinds": kinds, "before": numbers[0], "after": numbers[1], "pictures": pictures}

    def _slot_picture(self, slot: Slot) -> int:
        mesh = self.program.mesh
        if mesh is None or mesh.num_devices == 1 or slot.sharding_attr is None:
            return NOWHERE
        sharding = self.program.sharding_of_slot(slot)
        return self._picture(slot.value, sharding, slot.sharding_attr, mesh)

    # Values of layers that another one stands for

    def _uses(self) -> dict[str, list[list[int]]]:
        """For each value on the page, its users in layers without rows of their own."""
        shown = (r for op, seat in self.seats.items() if not seat.layer for r in op.results)
        uses: dict[str, list[list[int]]] = {}
        for value in (*(slot.value for slot in self.program.arguments), *shown):
            users = [self.seats.get(use.operation) for use in value.uses]
            away = [self._reference(seat) for seat in users if seat is not None and seat.layer]
            if away:
                uses[self.lines.name(value)] = away
        return uses

    def _away(self) -> dict[str, list[int]]:
        """Map operands of rows whose producers have no rows, by name, to references to these."""
        away: dict[str, list[int]] = {}
        for op, seat in self.seats.items():
            if seat.layer:
                continue
            for value in op.operands:
                maker = self.seats.get(value.owner) if isinstance(value.owner, Operation) else None
                if maker is not None and maker.layer:
                    away[self.lines.name(value)] = self._reference(maker)
        return away

    def _reference(self, seat: Seat) -> list[int]:
        return [seat.row, self.words.number(seat.layer)]


def _seats(layers: Iterable[LayerPairs], first_row: int) -> dict[Operation, Seat]:
    seats: dict[Operation, Seat] = {}
    row = first_row
    for layer in layers:
        rows = [row + i for i, pair in enumerate(layer.pairs) if pair.after is not None]
        for name, members in zip(layer.layers, layer.members, strict=True):
            own = "" if name == layer.layers[0] else name
            seats.update((op, Seat(at, own)) for op, at in zip(members, rows, strict=True))
        row += len(layer.pairs)
    return seats


def _source_line(op: Operation) -> str:
    """Source location of an op as `folder/file:line`, with the last folder of its path; "" if
    unknown."""
    place = op.location
    if not isinstance(place, FileLineColLoc):
        return ""
    return f"{'/'.join(Path(place.filename.data).parts[-2:])}:{place.line.data}"


def _notes(slot: Slot) -> str:
    """Format a slot's attributes, such as its sharding, except kind and name."""
    notes = [
        f"{name.removeprefix('dist.')} = {value}"
        for name, value in slot.attributes.data.items()
        if name not in ("dist.kind", "dist.name")
    ]
    return f" {{{', '.join(notes)}}}" if notes else ""


def _slot_kind(before: SlotLine | None, after: SlotLine | None) -> int:
    if before is None or after is None:
        return KINDS.index("added" if before is None else "removed")
    return KINDS.index("same" if before[1] == after[1] else "changed")
