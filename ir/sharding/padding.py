"""Padding in the shards of unevenly sharded values, while a program is made local.

All shards have the largest one's shape; on the last devices of an axis a shard ends in padding.
The padding's values do not matter to an op that keeps the dim, as it works on each index alone.
Before an op reduces over the dim, the padding of every operand is set to the identity of the
reduction: 0 for a sum (of products too), the lowest number for a maximum. Padding of indices into
a table is set to 0, a row that every table has.

Much padding is 0 already: that of arguments is, and many ops map zeros to zeros. `Padding` tracks
which padding is 0, so that a mask is added only where one is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import phase_of, set_shardings, sharding_attrs_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import (
    DimSharding,
    Placement,
    Sharding,
    contiguous,
    is_contiguous,
    is_even,
    padded_size,
    part_size,
)
from shardweave.ir.ops.registry import gives_zero, spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.ir.sharding.localizer import Localizer
from shardweave.ir.sharding.rules.base import Dims, Rule


def zeros_of(sharding: Sharding, shape: Sequence[int]) -> frozenset[int]:
    """The dims that `sharding` pads. For an argument of the step this padding is zeros."""
    pairs = enumerate(zip(sharding.dims, shape, strict=True))
    return frozenset(dim for dim, (cut, size) in pairs if not is_even(cut, size))


SAID = 3
"""Number of sizes that a note on padding names: those with the largest share of padding."""


def notes_on_padding(program: Program) -> list[str]:
    """Return a note on the padding that a propagated or local program computes; [] if none."""
    mesh = program.mesh
    if mesh is None:
        return []
    cuts = dict.fromkeys(cut for attr in _shardings_in(program) for cut in _uneven_cuts(attr, mesh))
    if not cuts:
        return []
    # Of sizes with the same axes and share of padding (rows, rows x positions), the smallest.
    alike = {
        (padded / size, axes): (size, padded, axes)
        for size, padded, axes in sorted(cuts, reverse=True)
    }
    most = sorted(alike.values(), key=lambda cut: cut[1] / cut[0], reverse=True)
    texts = [f"{size} over {axes} as {padded}" for size, padded, axes in most[:SAID]]
    rest = len(most) - SAID
    more = [f"{rest} more size{'s' * (rest > 1)}"] if rest > 0 else []
    return [
        "sizes that do not divide are padded, and devices compute the padding in vain: "
        + ", ".join([*texts, *more])
    ]


def _shardings_in(program: Program) -> dict[ShardingAttr, None]:
    """The distinct sharding annotations of a program's slots and ops."""
    shardings: dict[ShardingAttr, None] = {}
    for part in parts_of(program):
        for slot in (*part.arguments, *part.results):
            own = slot.attributes.data.get("dist.sharding")
            if isinstance(own, ShardingAttr):
                shardings[own] = None
        for op in part.ops:
            shardings |= dict.fromkeys(sharding_attrs_of(op) or ())
    return shardings


def _uneven_cuts(sharding: ShardingAttr, mesh: Mesh) -> Iterator[tuple[int, int, str]]:
    """The size, the padded size, and the sharding axes of each dim that is sharded unevenly."""
    for axes, strides, length in zip(
        sharding.dims, sharding.strides, sharding.lengths, strict=True
    ):
        names, size = [axis.data for axis in axes], length.data
        if not size:
            continue
        if any(stride.data for stride in strides):
            sizes = zip(names, strides, strict=True)
            cut = [Placement(name, mesh.size(name), stride.data) for name, stride in sizes]
        else:
            cut = contiguous(names, size, mesh)
        yield size, padded_size(cut, size), ",".join(f"{n}={mesh.size(n)}" for n in names)


@dataclass
class Padding:
    """Records which padding is 0 in a local program that is being written.

    zero: by local value, the dims whose padding is 0.
    """

    zero: dict[SSAValue, frozenset[int]] = field(default_factory=dict[SSAValue, frozenset[int]])
    _masked: dict[tuple[SSAValue, int, float, str], SSAValue] = field(
        default_factory=dict[tuple[SSAValue, int, float, str], SSAValue]
    )

    def neutral(self, form: Localizer, rule: Rule, shardings: Sequence[Sharding]) -> Localizer:
        """Fill the padding of an op's operands with values that cannot change its results.
        shardings: one for each operand."""
        uneven = _uneven(form)
        if not uneven:
            return form
        lost = uneven & {f for dims in rule.results for f in rule.lost(dims, form.placements)}
        values = list(form.operands)
        for index, dims in enumerate(rule.operands):
            for dim, names in enumerate(dims):
                factor = names[0] if names else None
                if factor is None or factor not in uneven:
                    continue
                for identity in _identities(form, rule, index, factor, lost):
                    given = form.op.operands[index]
                    place = _Place(dim, shardings[index], shape_of(given))
                    values[index] = self._fill(form, values[index], place, identity)
        return replace(form, operands=values)

    def _fill(self, form: Localizer, value: SSAValue, place: _Place, identity: float) -> SSAValue:
        """Set a value's padding in dim `place.dim` to `identity`."""
        zero = self.zero.get(value, frozenset())
        if identity == 0 and place.dim in zero:
            return value
        key = value, place.dim, identity, phase_of(form.op)
        if key not in self._masked:
            filled = _filled(form, value, place, identity)
            self.zero[filled] = zero | {place.dim} if identity == 0 else zero - {place.dim}
            self._masked[key] = filled
        return self._masked[key]

    def note(self, form: Localizer, rule: Rule, made: Sequence[SSAValue]) -> None:
        """Record in which dims the padding of `made`, an op's local results, is 0."""
        uneven = _uneven(form)
        if not uneven:
            return
        for value, dims in zip(made, rule.results, strict=True):
            self.zero[value] = frozenset(
                dim
                for dim, names in enumerate(dims)
                if names and names[0] in uneven and self._is_zero(form, rule, names[0])
            )

    def _is_zero(self, form: Localizer, rule: Rule, factor: int) -> bool:
        bearing = {
            index: self._holds_zero(form.operands[index], dims, factor)
            for index, dims in enumerate(rule.operands)
            if any(names and names[0] == factor for names in dims)
        }
        return gives_zero(form.op, bearing)

    def _holds_zero(self, value: SSAValue, dims: Dims, factor: int) -> bool:
        zero = self.zero.get(value, frozenset())
        return all(d in zero for d, names in enumerate(dims) if names and names[0] == factor)


@dataclass(frozen=True)
class _Place:
    """Index of a dim, with the sharding and global shape of its value."""

    dim: int
    sharding: Sharding
    shape: tuple[int, ...]

    @property
    def placements(self) -> DimSharding:
        return self.sharding.dims[self.dim]


def _uneven(form: Localizer) -> frozenset[int]:
    pairs = enumerate(zip(form.placements, form.sizes, strict=True))
    return frozenset(factor for factor, (cut, size) in pairs if not is_even(cut, size))


def _identities(
    form: Localizer, rule: Rule, index: int, factor: int, lost: frozenset[int]
) -> Iterator[float]:
    """Yield the value that operand `index` must have as padding along `factor`, if it matters."""
    spec, dtype = spec_of(form.op), dtype_of_value(form.operands[index])
    if spec.has_indices and index and not dtype.is_floating_point:
        yield 0
    elif rule.factors[factor].reach:
        yield 0  # what lies beyond the last index
    elif factor in lost and not (spec.is_lookup and index == 0):
        yield 0 if rule.factors[factor].reduction == "sum" else lowest_of(dtype)


def lowest_of(dtype: torch.dtype) -> float:
    """The number that changes no maximum."""
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _filled(form: Localizer, value: SSAValue, place: _Place, identity: float) -> SSAValue:
    shape, dtype = shape_of(value), dtype_of_value(value)
    length = shape[place.dim]
    size = place.shape[place.dim]
    positions = held_indices(form, place.placements, size)
    (is_padding,) = form.emit("aten.ge.Scalar", [positions], ((length,), torch.bool), other=size)
    column = (length, *(1 for _ in shape[place.dim + 1 :]))
    if len(column) > 1:
        (is_padding,) = form.emit("aten.view", [is_padding], (column, torch.bool))
    fill = int(identity) if not dtype.is_floating_point else identity
    (filled,) = form.emit(
        "aten.masked_fill.Scalar", [value, is_padding], (shape, dtype), value=fill
    )
    owner = filled.owner
    assert isinstance(owner, Operation)
    set_shardings(owner, [place.sharding], [place.shape])
    return filled


def held_indices(form: Localizer, placements: DimSharding, size: int) -> SSAValue:
    """Emit the global indices (1-D, i64) of this rank's elements of a dim of global `size`."""
    length = part_size(placements, size)
    type_ = (length,), torch.int64
    (own,) = form.emit("aten.arange.start_step", [], type_, start=0)
    if is_contiguous(placements, size):
        return _added(form, own, form.shard_index(placements), length)
    upper = length
    for placement in reversed(placements):
        stride = placement.stride
        if upper > stride:
            # Spread the local indices: this placement separates their blocks.
            (block,) = form.emit(
                "aten.div.Scalar_mode", [own], type_, other=stride, rounding_mode="floor"
            )
            own = _added(form, own, block, placement.span - stride)
        own = _added(form, own, form.shard_index((placement,)), stride)
        upper *= placement.size
    return own


def _added(form: Localizer, own: SSAValue, number: SSAValue, unit: int) -> SSAValue:
    """Emit own + number * unit (i64)."""
    type_ = shape_of(number), torch.int64
    (offset,) = form.emit("aten.mul.Scalar", [number], type_, other=unit)
    return form.emit("aten.add.Tensor", [own, offset], (shape_of(own), torch.int64))[0]
