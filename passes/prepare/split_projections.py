"""Splitting fused projections (`projections`) into one linear map for each part.

By an op's sharding rule, a slice of its result is the op on slices of its operands. So a reader of
a part reads the op computed on parts: forward, back to a slice of the weight; backward, back to the
gradients of the parts. The gradient of the input becomes a sum over parts, the gradient of the
weight a concatenation of its parts' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects.annotations import describe, phase_of, set_wanted_attrs
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.syntax import Operands
from shardweave.ir.dialects.types import shape_of, tensor_type_of, with_shape
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import PART, PARTS, Program
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.ir.sharding.rules import rule_of
from shardweave.passes.prepare.projections import (
    FusedProjection,
    Place,
    Read,
    projection_of,
    reads_of_parts,
)
from shardweave.passes.program_pass import PassOnProgram


def split_projections(program: Program) -> int:
    """Split the linear maps whose weights are annotated with parts; returns how many.

    A parameter's `dist.parts` is the number of parts, its `dist.part` the sharding of each part.
    Takes time linear in the ops. Raises ValueError for a weight whose map is not read in such
    parts, for a sharding that does not fit a part, and for a program that is propagated.
    """
    check_not_propagated(program, "split-projections")
    slots = program.arguments
    counts = {
        slot.value: count.value.data
        for slot in slots
        if isinstance(count := slot.attributes.data.get(PARTS), IntegerAttr)
    }
    if not counts:
        return 0
    names = {slot.value: slot.name for slot in slots}
    projections = [
        proj
        for op in program.ops
        if isinstance(op, AtenOp)
        for count in sorted(set(counts.values()))
        if (proj := projection_of(op, count)) and counts.get(proj.weight.value) == count
    ]
    unread = counts.keys() - {proj.weight.value for proj in projections}
    if unread:
        raise ValueError(
            _problem(names[unread.pop()], "no linear map of the forward pass reads it")
        )
    wanted = {
        slot.value: sharding
        for slot in slots
        if isinstance(sharding := slot.attributes.data.get(PART), ShardingAttr)
    }
    for proj in projections:
        _check_fits(proj.weight, wanted.get(proj.weight.value), names[proj.weight.value], program)
    _Split(program, projections, wanted).run()
    for proj in projections:
        if proj.op.parent is not None:
            problem = f"the outputs of {describe(proj.op)} are not only read in equal parts"
            raise ValueError(_problem(names[proj.weight.value], problem))
    indices = [index for index, slot in enumerate(slots) if slot.value in counts]
    for attribute in (PARTS, PART):
        program.set_argument_attributes(attribute, dict.fromkeys(indices))
    return len(projections)


def _check_fits(place: Place, wanted: ShardingAttr | None, name: str, program: Program) -> None:
    if wanted is not None:
        try:
            wanted.on(place.shape, program.needed_mesh())
        except ValueError as error:
            raise ValueError(
                f"parameter '{name}' cannot be split into {place.count} projections: {error}"
            ) from error


def _problem(name: str, problem: str) -> str:
    return (
        f"parameter '{name}' is not the weight of a fused projection of equal parts: {problem}; "
        "leave it out of the plan's 'projections'."
    )


@dataclass
class _Split:
    """Rewrites a program's fused projections.

    wanted: shardings of each part, by weight. made: parts by place and index (for arguments also
    phase); None stands for zeros. arguments: places of the arguments that parts were sliced from.
    """

    program: Program
    projections: Sequence[FusedProjection]
    wanted: Mapping[SSAValue, ShardingAttr]
    made: dict[tuple[object, ...], SSAValue | None] = field(
        default_factory=dict[tuple[object, ...], SSAValue | None]
    )
    arguments: dict[SSAValue, Place] = field(default_factory=dict[SSAValue, Place])

    def run(self) -> None:
        outputs = {proj.op.results[0] for proj in self.projections}
        for read in list(reads_of_parts(self.program)):
            if any(place.value in outputs for place in read.place.origins()):
                self._give_part(read)
        for op in list(self.program.ops):
            if isinstance(op, AtenOp) and phase_of(op) != "forward":
                self._sum_parts(op)
        places = {
            slot.name: self.arguments[slot.value]
            for slot in self.program.arguments
            if slot.value in self.arguments
        }
        for slot in self.program.results:
            if slot.kind == "grad" and slot.name in places:
                self._put_together(slot.value, places[slot.name])
        remove_dead_ops(self.program)

    def _give_part(self, read: Read) -> None:
        """Replace a slice of a fused map's outputs by a map that computes only this part."""
        part = self._part(read.place, read.start // read.place.length, read.op)
        assert part is not None, "nothing in the forward pass puts zeros together"
        if read.op.name == "aten.select.int":
            part = self._add("aten.view", [part], shape_of(read.op.results[0]), read.op)
        Rewriter.replace_op(read.op, [], [part])

    def _sum_parts(self, op: AtenOp) -> None:
        product = spec_of(op).product
        if product is None or product.addend is not None:
            return
        rule = rule_of(op)
        kept = {factor for names in rule.results[0] for factor in names}
        weights = {proj.weight for proj in self.projections}
        for count in sorted({weight.count for weight in weights}):
            places = [
                Place(op.operands[index], dim, count)
                for index in product.factors
                for dim, names in enumerate(rule.operands[index])
                if names and names[0] not in kept
            ]
            is_of_weight = any(origin in weights for place in places for origin in place.origins())
            if len(places) == 2 and is_of_weight:
                self._replace_by_sum(op, places)
                return

    def _replace_by_sum(self, op: AtenOp, places: Sequence[Place]) -> None:
        total: SSAValue | None = None
        for index in range(places[0].count):
            parts = [self._part(place, index, op) for place in places]
            operands = [part for part in parts if part is not None]
            if len(operands) < len(parts):
                continue
            term = self._add(op.name, operands, shape_of(op.results[0]), op)
            if total is not None:
                term = self._add("aten.add.Tensor", [total, term], shape_of(term), op)
            total = term
        if total is not None:
            Rewriter.replace_op(op, [], [total])

    def _put_together(self, value: SSAValue, place: Place) -> None:
        """Concatenate the gradient of a weight or bias, the argument `place`, from its parts'."""
        owner = value.owner
        if not isinstance(owner, AtenOp):
            return
        whole = Place(value, place.dim, place.count)
        parts = [self._part(whole, index, owner) for index in range(place.count)]
        if all(part is not None for part in parts):
            new = self._add("aten.cat", [parts], shape_of(value), owner, dim=place.dim)
            value.replace_all_uses_with(new)

    # Parts

    def _part(self, place: Place, index: int, reader: AtenOp) -> SSAValue | None:
        """Part `index` of a value, computed once, before `reader`; None if it is zeros."""
        is_argument = isinstance(place.value.owner, Block)
        key = place, index, phase_of(reader) if is_argument else ""
        if key not in self.made:
            self.made[key] = self._make(place, index, reader)
        return self.made[key]

    def _make(self, place: Place, index: int, reader: AtenOp) -> SSAValue | None:
        owner = place.value.owner
        if not isinstance(owner, AtenOp):
            self.arguments[place.value] = place
            return self._cut_out(place, index, InsertPoint.before(reader), reader)
        put = _Put.into(owner, place.dim)
        if put is not None:
            part = put.inside(index * place.length, place.length)
            if part is None:
                return None
            if part.is_exact:
                return self._add("aten.view", [part.value], place.shape, owner)
        sources = place.sources()
        if sources is None:
            return self._cut_out(place, index, InsertPoint.after(owner), owner)
        operands: list[SSAValue | None] = list(owner.operands)
        for at, source in sources:
            operands[at] = self._part(source, index, owner)
        given = [value for value in operands if value is not None]
        if len(given) < len(operands):
            if not given or spec_of(owner).zero == "any":
                return None
            if owner.name == "aten.add.Tensor" and shape_of(given[0]) == place.shape:
                return given[0]
            return self._cut_out(place, index, InsertPoint.after(owner), owner)
        return self._clone(owner, given, place.shape)

    def _cut_out(self, place: Place, index: int, at: InsertPoint, like: AtenOp) -> SSAValue:
        type_ = with_shape(tensor_type_of(place.value), place.shape)
        values = {"dim": place.dim, "start": index * place.length}
        new = create("aten.slice.Tensor", [place.value], [type_], values)
        if place.value in self.wanted:
            set_wanted_attrs(new, [self.wanted[place.value]])
        return self._insert(new, at, like)

    def _clone(self, op: AtenOp, operands: Sequence[SSAValue], shape: tuple[int, ...]) -> SSAValue:
        type_ = with_shape(tensor_type_of(op.results[0]), shape)
        return self._insert(remade(op, operands, [type_]), InsertPoint.before(op), op)

    def _add(
        self, name: str, operands: Operands, shape: tuple[int, ...], like: AtenOp, **values: int
    ) -> SSAValue:
        if name == "aten.view" and isinstance(operands[0], SSAValue):
            if shape_of(operands[0]) == shape:
                return operands[0]
        type_ = with_shape(tensor_type_of(like.results[0]), shape)
        new = create(name, operands, [type_], values)
        return self._insert(new, InsertPoint.before(like), like)

    def _insert(self, op: AtenOp, at: InsertPoint, like: AtenOp) -> SSAValue:
        return Builder.at(at, like).insert(op, like.results[0]).results[0]


@dataclass(frozen=True)
class _Put:
    """A value made of `pieces`, (value, start, length) along a dim, and zeros elsewhere."""

    pieces: tuple[tuple[SSAValue, int, int], ...]

    @staticmethod
    def into(op: Operation, dim: int) -> _Put | None:
        """Match an op that concatenates values along `dim`, or puts one among zeros; None for
        others."""
        assert isinstance(op, AtenOp)
        size = len(shape_of(op.results[0]))
        if op.name != "aten.cat" and not spec_of(op).places:
            return None
        if int(op.value("dim")) % size != dim:
            return None
        if op.name == "aten.cat":
            pieces: list[tuple[SSAValue, int, int]] = []
            start = 0
            for value in op.operands:
                length = shape_of(value)[dim]
                pieces.append((value, start, length))
                start += length
            return _Put(tuple(pieces))
        (value,) = op.operands
        if len(shape_of(value)) < size:
            return _Put(((value, int(op.value("index")) % shape_of(op.results[0])[dim], 1),))
        if op.value("step") != 1:
            return None
        return _Put(((value, int(op.value("start") or 0), shape_of(value)[dim]),))

    def inside(self, start: int, length: int) -> _Inside | None:
        """The first piece between `start` and `start + length`; None if only zeros are there."""
        touching = [
            piece for piece in self.pieces if piece[1] < start + length and start < sum(piece[1:])
        ]
        if not touching:
            return None
        value, first, own = touching[0]
        return _Inside(value, len(touching) == 1 and (first, own) == (start, length))


@dataclass(frozen=True)
class _Inside:
    """A piece that lies in a part of a dim. is_exact: whether it fills exactly that part."""

    value: SSAValue
    is_exact: bool


@dataclass(frozen=True)
class SplitProjectionsPass(PassOnProgram):
    """Compute each part of a fused projection by a linear map of its own, on a slice of its weight.

    A plan's `projections` choose the maps and the numbers of parts, and `apply-plan` annotates
    their weights (`dist.parts`). Each part can then be sharded by heads that do not divide: a
    sharding of the fused outputs could not express the padding of each part.

    Requires: a global program, before `propagate-shardings`; the map's outputs are only read
    in these parts. Ensures: numerics unchanged except for the order of sums over the parts. Linear
    in the ops.
    """

    name = "split-projections"

    def run(self, program: Program) -> None:
        split_projections(program)
