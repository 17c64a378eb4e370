"""The relation of a local value to a global program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

from xdsl.ir import Attribute

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding
from shardweave.ir.proof.relations.layout import Layout, cut_at, joined, length, standard

FREE = "*"
"""Prefix of the axis of a placement along which the value is constant, so that any axes match it.
The number of constant indices follows; they are the digits below the placement's span."""

SUB_BATCH = "sub_batch."
"""Prefix of the names of sub-batch axes; their size follows. The walk infers them from slices."""

RING = "ring."
"""Prefix of the names of a ring's axes, whose coordinates count from each rank (`steps.ring`)."""

TIMES = (SUB_BATCH, RING)
"""Prefixes of the axes on which a value has coordinates (`Relation.at`)."""

Shape = tuple[int, ...]
Coordinates = tuple[tuple[str, frozenset[int]], ...]
"""A shard's coordinates by sub-batch axis: one, or several if the value sums over them."""


Cuts = tuple[DimSharding, ...]
"""The placements that shard each factor of a rule."""


def is_free(placement: Placement) -> bool:
    return placement.axis.startswith(FREE)


def _lowest(free: Placement) -> int:
    """The smallest stride of the digits along which a value with this placement is constant."""
    return max(1, free.span // int(free.axis.removeprefix(FREE)))


def stands_for(own: DimSharding, cut: DimSharding) -> bool:
    """True if `own` equals `cut` after fitting placements of `cut` replace its free ones."""
    if own == cut:
        return True
    rest = [placement for placement in cut if placement not in own]
    for free in filter(is_free, own):
        within = [p for p in rest if _lowest(free) <= p.stride and p.span <= free.span]
        if prod(p.size for p in within) != free.size:
            return False
        rest = [p for p in rest if p not in within]
    kept = [p for p in own if not is_free(p)]
    return not rest and all(p in cut for p in kept)


@dataclass(frozen=True)
class Fill:
    """The known value of padding: of all elements with an index past the end of a dim in `dims`."""

    value: float
    dims: frozenset[int]


@dataclass(frozen=True)
class Held:
    """A sharded expression, as a rank holds it.

    number: the expression's. shape: its global shape. sharding: over mesh axes and sub-batch axes,
    with the axes over which it is unreduced. terms: id of the split into terms over sub-batches, or
    into maxima of shards, so that terms of different splits do not mix; 0 without a split. layout:
    the digits of each local dim; None if the sharding implies them. Digits may reach past the end
    of a dim: the elements there are padding. fill: the known values of this padding.
    """

    number: int
    shape: Shape
    sharding: Sharding
    terms: int = 0
    layout: Layout | None = None
    fill: Fill | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        key = (self.number, self.shape, self.sharding, self.terms, self.layout, self.fill)
        return hash(key)

    @property
    def digits(self) -> Layout | None:
        """The local layout: `layout` if set, else the layout that the sharding implies."""
        return self.layout or standard(self.shape, self.sharding.dims)

    @cached_property
    def local_shape(self) -> Shape | None:
        """The shape of a rank's shard, with its padding; None if the sharding does not fit."""
        digits = self.digits
        return None if digits is None else tuple([length(own) for own in digits])

    def laid_out(self, layout: Layout | None, sharding: Sharding | None = None) -> Held | None:
        """Replace the layout, and the sharding if given; None if `layout` is None."""
        if layout is None:
            return None
        sharding = sharding or self.sharding
        plain = standard(self.shape, sharding.dims)
        made = replace(self, sharding=sharding, layout=None if layout == plain else layout)
        return made.filled(self.fill)

    def filled(self, fill: Fill | None) -> Held:
        """Replace the known padding; dims of `fill` without padding are dropped."""
        dims = frozenset(fill.dims & self._padded) if fill and fill.dims else None
        known = Fill(fill.value, dims) if fill and dims else None
        return self if known == self.fill else replace(self, fill=known)

    @property
    def _padded(self) -> set[int]:
        digits = [digit for own in self.digits or () for digit in own]
        placed = [
            (dim, p.stride, p.size) for dim, cut in enumerate(self.sharding.dims) for p in cut
        ]
        return {dim for dim, stride, size in (*digits, *placed) if stride * size > self.shape[dim]}

    def zeros(self) -> Fill | None:
        """Return `fill` if it is zero: sums of such values have zero padding too. Else None."""
        return self.fill if self.fill and self.fill.value == 0 else None


@dataclass(frozen=True)
class Relation:
    """A local value described as a shard of a global expression. at: the coordinates on time axes
    of the sub-batches that it belongs to."""

    held: Held
    at: Coordinates = ()

    def with_held(self, held: Held | None) -> Relation | None:
        return None if held is None else Relation(held, self.at)


@dataclass(frozen=True)
class RankNumber:
    """An integer computed from a rank's coordinates: a constant plus a multiple of each."""

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    def plus(self, other: RankNumber) -> RankNumber:
        total = dict(self.terms)
        for axis, factor in other.terms:
            total[axis] = total.get(axis, 0) + factor
        kept = tuple(sorted(item for item in total.items() if item[1]))
        return RankNumber(kept, self.constant + other.constant)

    def times(self, factor: int) -> RankNumber:
        return RankNumber(
            tuple((axis, f * factor) for axis, f in self.terms if factor), self.constant * factor
        )


@dataclass(frozen=True)
class Row:
    """Different values, concatenated along `dim`. pieces: each value with its size along `dim`."""

    dim: int
    pieces: tuple[tuple[Value, int], ...]

    def taken(self, op: AtenOp) -> Value | None:
        """Return the value or values that a slice selects; None if it cuts through a value."""
        if int(op.value("dim")) != self.dim or op.value("step") != 1:
            return None
        start, size = int(op.value("start") or 0), shape_of(op.results[0])[self.dim]
        at, covered = 0, list[tuple[Value, int]]()
        for piece, width in self.pieces:
            if start <= at and at + width <= start + size:
                covered.append((piece, width))
            at += width
        if sum(width for _, width in covered) != size:
            return None
        return covered[0][0] if len(covered) == 1 else Row(self.dim, tuple(covered))


@dataclass(frozen=True)
class Local:
    """A local value without a relation of its own: an op, with the relations of its operands.

    It may be a step of a local form, whose last result has a relation.
    """

    name: str
    arguments: frozenset[tuple[str, Attribute]]
    operands: tuple[Value, ...]
    types: tuple[tuple[Shape, str], ...]
    index: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.arguments, self.operands, self.types, self.index))

    @cached_property
    def leaves(self) -> frozenset[Relation]:
        """The nearest relations that this value is computed from."""
        leaves: set[Relation] = set()
        for operand in self.operands:
            if isinstance(operand, Local):
                leaves |= operand.leaves
            elif isinstance(operand, Relation):
                leaves.add(operand)
        return frozenset(leaves)


Value: TypeAlias = "Relation | RankNumber | Row | Local"


@dataclass
class ProofAxes:
    """The axes of a proof: the mesh's, and axes of sub-batches and rings, added as the walk meets
    them. rings: the mesh axes that have rings."""

    mesh: Mesh
    sub_batches: dict[str, int] = field(default_factory=dict[str, int])
    rings: dict[str, None] = field(default_factory=dict[str, None])

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.mesh.names, *self.sub_batches)

    def size(self, name: str) -> int:
        return self.sub_batches.get(name) or self.mesh.size(name)

    @property
    def sized(self) -> tuple[tuple[str, int], ...]:
        """All axes in order, with their sizes."""
        return tuple([(name, self.size(name)) for name in self.names])

    def wide(self, names: Sequence[str]) -> list[str]:
        """The axes among `names` that have more than one coordinate."""
        return [name for name in names if self.size(name) > 1]

    def sub_batch(self, size: int, sharding: Sharding) -> str:
        """Add an axis of `size` sub-batches that `sharding` does not use; return its name."""
        name = f"{SUB_BATCH}{size}"
        while name in sharding.axes:
            name += "_"
        self.sub_batches[name] = size
        return name


def concatenated(held: Held, axes: Sequence[str], dim: int, block: int | None) -> Held | None:
    """All-gather along a local dim in blocks of `block` (None: all of it); None if impossible."""
    layout = held.digits
    if layout is None or not 0 <= dim < len(layout) or set(axes) & set(held.sharding.unreduced):
        return None
    moved: list[tuple[int, int, int]] = []
    for axis in axes:
        seat = held.sharding.seat_of(axis)
        if seat is None:
            return None
        moved.append((seat[0], seat[1].stride, seat[1].size))
    parts = ((), layout[dim]) if block is None else cut_at(layout[dim], block)
    if parts is None:
        return None
    digits = joined([*parts[0], *moved, *parts[1]])
    after = held.sharding.without(axes)
    return held.laid_out((*layout[:dim], digits, *layout[dim + 1 :]), after)


def has_terms(sharding: Sharding) -> bool:
    """True if a value of this sharding needs a split id (`Held.terms`): it is unreduced over
    sub-batches, or is a block of an unreduced value, which may travel, or is a shard's own maximum,
    which other ops may read before it is reduced."""
    if not sharding.unreduced:
        return False
    is_block = any(axis.startswith(RING) for axis in sharding.placed_axes)
    is_split = any(axis.startswith(TIMES) for axis in sharding.unreduced)
    return is_block or is_split or sharding.reduction == "max"


def reduced_over(held: Held, axes: Sequence[str]) -> Held | None:
    """Reduce a value over axes; None unless it is unreduced over all of them."""
    if not set(axes) <= set(held.sharding.unreduced):
        return None
    after = held.sharding.reduced(axes)
    made = replace(held, sharding=after, terms=held.terms if has_terms(after) else 0)
    return made.filled(held.zeros())
