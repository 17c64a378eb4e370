"""Fused projections: linear maps whose outputs are read in equal parts, each separately.

One linear map may compute queries, keys and values as 3 h d features, of which each third is read
separately. If the sharding's degree divides the h heads, a device's shard is a stripe of each part.
If not, each part would need padding, which no sharding expresses. Three maps, each with a slice of
the weight, can be sharded separately: heads are the major factor of their features.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of, weight_of
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.rules import rule_of


@dataclass(frozen=True)
class Place:
    """A dim of a value, split into `count` parts of equal length."""

    value: SSAValue
    dim: int
    count: int

    @property
    def length(self) -> int:
        return shape_of(self.value)[self.dim] // self.count

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(shape_of(self.value))
        shape[self.dim] = self.length
        return tuple(shape)

    def sources(self) -> list[tuple[int, Place]] | None:
        """Operands, and dims in them, whose parts yield this value's parts; None if unknown."""
        op = self.value.owner
        if not isinstance(op, AtenOp) or not spec_of(op).works_in_parts:
            return None
        rule = rule_of(op)
        names = rule.results[0][self.dim]
        if not names or rule.factors[names[0]].size % self.count or rule.localize is not None:
            return None
        sources: list[tuple[int, Place]] = []
        for index, dims in enumerate(rule.operands):
            for dim, own in enumerate(dims):
                if names[0] in own[1:]:
                    return None  # it has parts of each index of another factor
                if names[0] in own[:1]:
                    sources.append((index, Place(op.operands[index], dim, self.count)))
        return sources

    def origins(self) -> Iterator[Place]:
        """Yield this place, and recursively the places from whose parts its parts are computed."""
        yield self
        for _, place in self.sources() or ():
            yield from place.origins()


@dataclass(frozen=True)
class FusedProjection:
    """A linear map `op`, and the dim of outputs of its `weight`, a parameter, split into parts."""

    op: AtenOp
    weight: Place


def projection_of(op: AtenOp, count: int) -> FusedProjection | None:
    """Match a forward linear map whose weight's outputs divide into `count` parts; else None."""
    weight = weight_of(op)
    if weight is None or phase_of(op) != "forward":
        return None
    rule = rule_of(op)
    given = {factor for names in rule.operands[weight - 1] for factor in names}
    for dim, names in enumerate(rule.operands[weight]):
        is_output = names and names[0] not in given
        if is_output and not shape_of(op.operands[weight])[dim] % count:
            *_, origin = Place(op.operands[weight], dim, count).origins()
            if isinstance(origin.value.owner, Block):
                return FusedProjection(op, origin)
    return None


def fused_projections(program: Program, among: Collection[AtenOp]) -> dict[AtenOp, int]:
    """Return the linear maps of `among` whose outputs are only read in equal parts, each with the
    number of parts."""
    counts: dict[AtenOp, set[int]] = {}
    reads: set[Operation] = set()
    for read in reads_of_parts(program):
        reads.add(read.op)
        for place in read.place.origins():
            if place.value.owner in among and isinstance(place.value.owner, AtenOp):
                counts.setdefault(place.value.owner, set()).add(place.count)
                break
    return {
        op: min(parts)
        for op, parts in counts.items()
        if spec_of(op).works_in_parts  # a convolution does not
        and len(parts) == 1
        and min(parts) > 1
        and _is_read_by(op.results[0], reads)
    }


def _is_read_by(value: SSAValue, reads: Collection[Operation]) -> bool:
    return all(
        use.operation in reads
        or (
            spec_of(use.operation).works_in_parts
            and phase_of(use.operation) == "forward"
            and spec_of(use.operation).product is None
            and _is_read_by(use.operation.results[0], reads)
        )
        for use in value.uses
    )


@dataclass(frozen=True)
class Read:
    """A slice op that takes one part of a dim. start: the index at which the part begins."""

    op: AtenOp
    place: Place
    start: int


def reads_of_parts(program: Program) -> Iterator[Read]:
    """Yield forward slices that take one of several equal parts of a dim."""
    for op in program.ops:
        if isinstance(op, AtenOp) and phase_of(op) == "forward":
            taken = _taken(op)
            if taken is not None:
                dim, start, length = taken
                size = shape_of(op.operands[0])[dim]
                if length and not size % length and not start % length:
                    yield Read(op, Place(op.operands[0], dim, size // length), start)


def _taken(op: AtenOp) -> tuple[int, int, int] | None:
    """The dim, start and length of a slice of step 1 or a select; None for other ops."""
    if op.name == "aten.select.int":
        dim, start, length = int(op.value("dim")), int(op.value("index")), 1
    elif op.name == "aten.slice.Tensor" and op.value("step") == 1:
        dim, start = int(op.value("dim")), int(op.value("start") or 0)
        length = shape_of(op.results[0])[dim]
    else:
        return None
    shape = shape_of(op.operands[0])
    dim %= len(shape)
    return dim, start % shape[dim], length
