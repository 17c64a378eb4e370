"""Recognize a slice of an op's result as the same op on slices of its operands.

A linear layer on a slice of its weight computes that slice of its output; the gradient of a
concatenation is the concatenation of gradients; and a product that contracts a concatenated dim is
the sum of the products of its slices. So a program with separate linear layers for queries, keys
and values equals a program that slices the output of one fused linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import annotate, properties_without
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.types import AnyTensor, dtype_of_value, shape_of, tensor_type
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.sharding.rules.base import Dims


class Table(Protocol):
    """Protocol of what `Pieces` uses of `Expressions`: shapes and sums by number, and methods."""

    shapes: list[tuple[int, ...]]
    sums: dict[int, dict[int, float]]

    def form(
        self, op: AtenOp, operands: Sequence[int], results: Sequence[int] | None = None
    ) -> list[int]: ...

    def apply(self, op: Operation, operands: Sequence[int]) -> list[int]: ...

    def note_sum(self, number: int, terms: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Cut:
    """A split of dim `dim` into `count` slices of equal length."""

    dim: int
    count: int

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one slice of a tensor of this shape."""
        return (*shape[: self.dim], shape[self.dim] // self.count, *shape[self.dim + 1 :])


@dataclass
class Pieces:
    """The slices of expressions. makers: by number, an expression's op and operands. joined: by
    number, the split that it concatenates. placed: by number, the slice that it surrounds by
    zeros."""

    table: Table
    makers: dict[int, tuple[AtenOp, tuple[int, ...]]] = field(
        default_factory=dict[int, tuple[AtenOp, tuple[int, ...]]]
    )
    joined: dict[int, Cut] = field(default_factory=dict[int, Cut])
    placed: dict[int, tuple[Cut, int, int]] = field(default_factory=dict[int, tuple[Cut, int, int]])
    _known: dict[tuple[int, Cut, int], int] = field(default_factory=dict[tuple[int, Cut, int], int])

    def taken(self, op: AtenOp, operand: int) -> int | None:
        """Number the result of a slice op; None unless the slice is one of equal slices."""
        is_part = spec_of(op).view == "part"
        place = _place_of(op, op.operands[0], op.results[0]) if is_part else None
        if place is None:
            return None
        piece = self.piece(operand, *place, op)
        return self._viewed(op, piece, shape_of(op.results[0]))

    def note(self, op: AtenOp, operands: Sequence[int], number: int) -> None:
        """Record the op that computes expression `number`, and any slices that it concatenates."""
        if number in self.makers or number in operands:
            return  # known, or a cast of what is
        self.makers[number] = op, tuple(operands)
        if spec_of(op).places and (place := _place_of(op, op.results[0], op.operands[0])):
            cut, index = place
            shape = cut.of(shape_of(op.results[0]))
            self.placed[number] = cut, index, self._viewed(op, operands[0], shape)
        elif op.name == "aten.cat":
            self._join(number, self._put_side_by_side(op, operands), op)
        elif spec_of(op).works_in_parts:
            self._join(number, self._put_in_zeros(number), op)
            for index, operand in enumerate(operands):
                if operand in self.joined:
                    self._passed_on(op, operands, number, index)

    def piece(self, number: int, cut: Cut, index: int, like: AtenOp) -> int:
        """Return the number of slice `index` of an expression. like: gives layer and dtype."""
        key = number, cut, index
        if key not in self._known:
            self._known[key] = self._made(number, cut, index, like)
        return self._known[key]

    def _made(self, number: int, cut: Cut, index: int, like: AtenOp) -> int:
        maker = self.makers.get(number)
        sources = self._sources(*maker, cut) if maker else None
        if maker is None or not sources:
            whole = Block(arg_types=[_type(self.table.shapes[number], like.operands[0])]).args
            shape = cut.of(self.table.shapes[number])
            start = index * shape[cut.dim]
            values = {"dim": cut.dim, "start": start}
            op = create("aten.slice.Tensor", whole, [_type(shape, like.operands[0])], values)
            annotate(op, like)
            return self.table.form(op, [number])[0]
        op, operands = maker
        numbers = [
            self.piece(operand, sources[at], index, op) if at in sources else operand
            for at, operand in enumerate(operands)
        ]
        return self._cloned(op, numbers, cut.of(self.table.shapes[number]))

    def _sources(self, op: AtenOp, operands: Sequence[int], cut: Cut) -> dict[int, Cut] | None:
        """Operands whose slices produce a slice of the result, with their splits; None if none."""
        if not spec_of(op).works_in_parts:
            return None
        if op.name == "aten.add.Tensor" and all(number in self.makers for number in operands):
            return None  # no bias: what is added up is no linear map
        rule = rule_of(op)
        names = rule.results[0][cut.dim]
        if not names or rule.localize is not None:
            return None
        return _places(rule.operands, names[0], rule.factors[names[0]].size, cut.count)

    def _cloned(self, op: AtenOp, numbers: Sequence[int], shape: Sequence[int]) -> int:
        """Return the number of a copy of `op` on these operands, with a result of this shape."""
        pairs = zip(numbers, op.operands, strict=True)
        types = [_type(self.table.shapes[number], operand) for number, operand in pairs]
        clone = type(op).create(
            operands=Block(arg_types=types).args,
            result_types=[_type(shape, op.results[0])],
            properties=properties_without(op, "sharding", "wanted"),
        )
        return self.table.apply(clone, numbers)[0]

    def _viewed(self, op: AtenOp, number: int, goal: tuple[int, ...]) -> int:
        """Return the number of an expression viewed in shape `goal`, with the dtype of `op`."""
        if self.table.shapes[number] == goal:
            return number
        given = Block(arg_types=[_type(self.table.shapes[number], op.results[0])]).args
        view = create("aten.view", given, [_type(goal, op.results[0])])
        annotate(view, op)
        return self.table.apply(view, [number])[0]

    # Values that are put together

    def _put_side_by_side(
        self, op: AtenOp, operands: Sequence[int]
    ) -> tuple[Cut, list[int]] | None:
        shapes = {self.table.shapes[number] for number in operands}
        if len(shapes) > 1 or len(operands) < 2:
            return None
        dim = int(op.value("dim")) % len(shape_of(op.results[0]))
        return Cut(dim, len(operands)), list(operands)

    def _put_in_zeros(self, number: int) -> tuple[Cut, list[int]] | None:
        """Slices that a sum concatenates by adding them padded with zeros; None for other sums."""
        terms, shape = self.table.sums.get(number, {}), self.table.shapes[number]
        placed = [self.placed[term] for term in terms if term in self.placed]
        is_plain = all(
            factor == 1 and self.table.shapes[term] == shape for term, factor in terms.items()
        )
        cuts, pieces = {cut for cut, _, _ in placed}, {index: piece for _, index, piece in placed}
        if not is_plain or not len(placed) == len(terms) == len(pieces) or len(cuts) != 1:
            return None
        (cut,) = cuts
        return (cut, [pieces[i] for i in range(cut.count)]) if len(pieces) == cut.count else None

    def _join(self, number: int, made: tuple[Cut, list[int]] | None, op: AtenOp) -> None:
        """Record that an expression is a concatenation. made: its split and slices' numbers."""
        if made is None or number in self.joined:
            return
        cut, numbers = made
        self.joined[number] = cut
        for index, piece in enumerate(numbers):
            self._known[number, cut, index] = piece
        types = [_type(self.table.shapes[piece], op.results[0]) for piece in numbers]
        result = _type(self.table.shapes[number], op.results[0])
        both = [Block(arg_types=types).args]
        cat = create("aten.cat", both, [result], {"dim": cut.dim})
        annotate(cat, op)
        self.table.form(cat, numbers, [number])

    def _passed_on(self, op: AtenOp, operands: Sequence[int], number: int, index: int) -> None:
        """Record the result of an op on a concatenated operand as a concatenation or a sum."""
        rule, cut = rule_of(op), self.joined[operands[index]]
        names = rule.operands[index][cut.dim]
        if not names or rule.localize is not None:
            return
        factor, size = names[0], rule.factors[names[0]].size
        places = _places(rule.operands, factor, size, cut.count)
        kept = _places(rule.results, factor, size, cut.count)
        product = spec_of(op).product
        if places is None or kept is None:
            return
        if kept:
            goal = kept[0]
            pieces = [self._part(op, operands, places, i, goal) for i in range(cut.count)]
            self._join(number, (goal, pieces), op)
        elif product and rule.factors[factor].reduction and number not in self.table.sums:
            pieces = [self._part(op, operands, places, i, None) for i in range(cut.count)]
            self.table.note_sum(number, pieces)

    def _part(
        self,
        op: AtenOp,
        operands: Sequence[int],
        places: dict[int, Cut],
        index: int,
        goal: Cut | None,
    ) -> int:
        numbers = [
            self.piece(operand, places[at], index, op) if at in places else operand
            for at, operand in enumerate(operands)
        ]
        shape = shape_of(op.results[0])
        return self._cloned(op, numbers, goal.of(shape) if goal else shape)


def _type(shape: Sequence[int], like: SSAValue) -> AnyTensor:
    return tensor_type(shape, dtype_of_value(like))


def _places(values: Sequence[Dims], factor: int, size: int, count: int) -> dict[int, Cut] | None:
    """Map the index of each value that has `factor` to the split of its dim in `count`.
    None if the factor is not the major one of a dim, or `count` does not divide its size."""
    cuts: dict[int, Cut] = {}
    for index, dims in enumerate(values):
        for dim, names in enumerate(dims):
            if factor in names[1:]:
                return None
            if factor in names:
                cuts[index] = Cut(dim, count)
    return None if size % count else cuts


def _place_of(op: AtenOp, whole: SSAValue, part: SSAValue) -> tuple[Cut, int] | None:
    """Split and index of the slice `part` of `whole`; None unless it is one of equal slices."""
    shape = shape_of(whole)
    dim = int(op.value("dim")) % len(shape)
    if len(shape_of(part)) < len(shape):
        return Cut(dim, shape[dim]), int(op.value("index")) % shape[dim]
    start, length = int(op.value("start") or 0), shape_of(part)[dim]
    is_piece = start >= 0 and op.value("step") == 1 and length and not start % length
    if not is_piece or shape[dim] % length:
        return None
    return (Cut(dim, shape[dim] // length), start // length) if length < shape[dim] else None
