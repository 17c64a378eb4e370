"""The effect of a collective on a value: what it reduces, gathers and shards over its axes.

Everything else about a collective follows from it: the sharding and shape of the result, the
tensors of a group of ranks, the local ops that replace it on a time axis, its proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Placement, Reduction, Sharding, block_of, fits
from shardweave.ir.mesh.shards import cut_out, merge_blocks

Blocks = tuple[int, int]
"""A dim, and the length (in local elements) of the blocks dealt to the ranks in turn."""


@dataclass(frozen=True)
class Effect:
    """Effect of a collective: reduce over its axes, then gather a dim, then shard a dim over them.

    reduces: the reduction, as "sum". gathers, shards: the dim and its block length
    (`placement.block_of`). A step that is None is skipped.
    """

    reduces: Reduction | None = None
    gathers: Blocks | None = None
    shards: Blocks | None = None

    @property
    def dims(self) -> set[int]:
        """The dims that it gathers or shards."""
        return {place[0] for place in (self.gathers, self.shards) if place is not None}

    def sharding_after(self, sharding: Sharding, axes: Sequence[str], mesh: Mesh) -> Sharding:
        """The result's sharding, given the operand's. ValueError if the op cannot take this."""
        wide = [axis for axis in axes if mesh.size(axis) > 1]
        if self.reduces is not None:
            sharding = _reduced(sharding, wide, self.reduces)
        if self.gathers is not None:
            sharding = _gathered(sharding, wide, *self.gathers)
        if self.shards is not None:
            sharding = _sharded(sharding, wide, *self.shards, mesh)
        return sharding

    def shape_after(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The local shape of the result on each of `ranks` ranks."""
        sizes = list(shape)
        if self.shards is not None:
            sizes[self.shards[0]] //= ranks
        if self.gathers is not None:
            sizes[self.gathers[0]] *= ranks
        return tuple(sizes)

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        """Compute each rank's result. members: the operands of the ranks in one group, in order."""
        results, size = list(members), len(members)
        if self.reduces is not None:
            results = [_total(results, self.reduces)] * size
        if self.gathers is not None:
            results = [merge_blocks(results, *self.gathers)] * size
        if self.shards is not None:
            dim, block = self.shards
            results = [cut_out(x, dim, size, block, index) for index, x in enumerate(results)]
        return results


def _reduced(sharding: Sharding, axes: Sequence[str], reduction: Reduction) -> Sharding:
    whole = [axis for axis in axes if axis not in sharding.unreduced]
    if whole:
        raise ValueError(
            f"the operand is not an unreduced sum over {whole}; reducing over these axes would "
            "add equal values several times, so leave the axes out"
        )
    if axes and reduction != sharding.reduction:
        raise ValueError(
            f'the op reduces by "{reduction}", but its operand is an unreduced '
            f'{sharding.reduction}; reduce it by "{sharding.reduction}"'
        )
    return sharding.reduced(axes)


def _gathered(sharding: Sharding, axes: Sequence[str], dim: int, block: int) -> Sharding:
    seats = [sharding.seat_of(axis) for axis in axes]
    placed = [seat[1] for seat in seats if seat is not None and seat[0] == dim]
    blocks = [block_of(sharding.dims[dim], placement) for placement in placed]
    # The first axis is the slowest of a rank's position.
    is_in_order = placed == sorted(placed, key=lambda placement: -placement.stride)
    if len(placed) < len(axes) or not is_in_order or any(own != block for own in blocks):
        raise ValueError(
            f"the op gathers dim {dim} over {list(axes)} in blocks of {block}, but its operand "
            "is not sharded so; gather the operand as it is sharded"
        )
    return sharding.without(axes)


def _sharded(sharding: Sharding, axes: Sequence[str], dim: int, block: int, mesh: Mesh) -> Sharding:
    taken = [axis for axis in axes if axis in sharding.axes]
    if taken:
        raise ValueError(
            f"the operand is already sharded or unreduced over {taken}; shard it only over axes "
            "on which it is replicated"
        )
    # The minor axis first: a major one then keeps its blocks apart.
    for axis in reversed(axes):
        placements, size, stride = sharding.dims[dim], mesh.size(axis), block
        for placement in placements:
            if block_of(placements, placement) <= block:
                stride *= placement.size
        placements = (*placements, Placement(axis, size, stride))
        if not fits(placements, max(placement.span for placement in placements)):
            raise ValueError(
                f"blocks of {block} over axis '{axis}' do not lie within the existing shards of "
                f"dim {dim}; use a block size that lies within them"
            )
        sharding = sharding.with_dim(dim, placements)
    return sharding


def _total(members: Sequence[Tensor], reduction: str) -> Tensor:
    if len(members) == 1:
        return members[0]
    stacked = torch.stack(list(members))
    if reduction == "max":
        return stacked.amax(0)
    if reduction == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    raise ValueError(f'found the reduction "{reduction}", expected "sum" or "max".')
