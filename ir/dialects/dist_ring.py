"""Ops between neighbours: `dist.halo`, `halo_add`, `shift`, and the `ring_slice` and `ring_join`.

At turn t of a ring the rank at position r holds the block of the rank at position r + t (modulo P).
No sharding expresses this, nor shards that overlap, so the results of a shift, of a ring slice and
of a halo carry none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from xdsl.dialects.builtin import StringAttr
from xdsl.irdl import (
    AtLeast,
    AttrSetConstraint,
    MessageConstraint,
    RangeOf,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)
from xdsl.irdl import var_operand_def as var_operands
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects.dist_base import (
    NUMBER,
    AlongDimOp,
    CollectiveOp,
    OverAxesOp,
    number_property,
)
from shardweave.ir.dialects.types import TENSOR, num_elements, shape_of
from shardweave.ir.mesh.effect import Effect
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.mesh.shards import merge_blocks, take_blocks


class _TurnedOp(OverAxesOp):
    def after(self, sharding: Sharding, mesh: Mesh) -> Sharding:
        raise ValueError("its result is a block of another rank; leave its sharding out")


@irdl_op_definition
class ShiftOp(_TurnedOp, CollectiveOp):
    """Give each rank of `axes` the next rank's value, and the last rank the first one's.

    The shape is kept. Traffic: the operand's bytes, in one step.
    """

    name = "dist.shift"
    value = operand_def(TENSOR)
    shifted = result_def(TENSOR)

    @property
    def effect(self) -> Effect:
        return Effect()

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        return [*members[1:], members[0]]

    @classmethod
    def sent(cls, elements: int, ranks: int) -> float:
        return float(elements)

    @classmethod
    def steps(cls, ranks: int) -> int:
        return 1


EDGE = MessageConstraint(
    AttrSetConstraint(frozenset({StringAttr("lowest"), StringAttr("repeat")})),
    '"lowest" or "repeat"',
)


Halo = tuple[int, int, int]
"""A dim, and how many indices of the previous and of the next rank a shard of it reaches into."""


class NeighboursOp(CollectiveOp):
    """Base of the ops that exchange ends of plain shards of `dim`: `before` indices with the
    previous rank, `after` with the next.

    `edge`: the values past the first and the last rank's shard: zeros, the lowest number
    ("lowest"), or the last index again ("repeat").
    Traffic: `before` indices to one neighbour and `after` to the other, in one step.
    """

    dim_attr = prop_def(NUMBER, prop_name="dim")
    before_attr = prop_def(NUMBER, prop_name="before")
    after_attr = prop_def(NUMBER, prop_name="after")
    edge_attr = opt_prop_def(EDGE, prop_name="edge")
    value = operand_def(TENSOR)
    result = result_def(TENSOR)
    ADDS: ClassVar[bool] = False

    @property
    def halo(self) -> Halo:
        before, after = self.before_attr.value.data, self.after_attr.value.data
        return self.dim_attr.value.data, before, after

    @property
    def edge(self) -> str:
        return "" if self.edge_attr is None else self.edge_attr.data

    def verify_(self) -> None:
        dim, before, after = self.halo
        shape = shape_of(self.value)
        if not 0 <= dim < len(shape):
            raise VerifyException(f"dim must be in [0, {len(shape)})")
        own = shape[dim] - (before + after if self.ADDS else 0)
        if min(before, after) < 0 or max(before, after, 1) > own:
            raise VerifyException(
                f"shards of {own} along dim {dim} cannot overlap by {before} and {after}; gather "
                "the value instead"
            )

    def after(self, sharding: Sharding, mesh: Mesh) -> Sharding:
        raise ValueError("shards overlap before it or after it; leave its sharding out")

    def expected_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        dim, before, after = self.halo
        more = -before - after if self.ADDS else before + after
        return (*shape[:dim], shape[dim] + more, *shape[dim + 1 :])

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        sent = [borders(x, self.halo, adds=self.ADDS) for x in members]
        previous = [None, *(ends[1] for ends in sent[:-1])]
        following = [*(ends[0] for ends in sent[1:]), None]
        join = narrowed if self.ADDS else widened
        each = zip(members, previous, following, strict=True)
        return [join(x, self.halo, left, right, self.edge) for x, left, right in each]

    def sent_elements(self, mesh: Mesh) -> float:
        dim, before, after = self.halo
        ranks, row = mesh.sizes(self.axes), num_elements(self.value) / shape_of(self.value)[dim]
        # Of two ranks, each has one neighbour.
        return row * {1: 0, 2: max(before, after)}.get(ranks, before + after)

    @classmethod
    def steps(cls, ranks: int) -> int:
        return 1


@irdl_op_definition
class HaloOp(NeighboursOp):
    """Extend each rank's shard of `dim` by its neighbours' nearest indices.

    Shapes: .. x nd x ..  ->  .. x (before + nd + after) x ...
    """

    name = "dist.halo"


@irdl_op_definition
class HaloAddOp(NeighboursOp):
    """Add the ends of a rank's value to its neighbours' shards: the transpose of `dist.halo`.

    Shapes: .. x (before + nd + after) x ..  ->  .. x nd x ...
    """

    name = "dist.halo_add"
    ADDS: ClassVar[bool] = True


def borders(x: Tensor, halo: Halo, *, adds: bool) -> tuple[Tensor, Tensor]:
    """The ends that a rank sends to the previous and next rank. adds: for `dist.halo_add`."""
    dim, before, after = halo
    first, last = (before, after) if adds else (after, before)
    return x.narrow(dim, 0, first), x.narrow(dim, x.shape[dim] - last, last)


def widened(
    x: Tensor, halo: Halo, previous: Tensor | None, following: Tensor | None, edge: str
) -> Tensor:
    """Concatenate a shard and its neighbours' ends; `edge` says what replaces one that is None."""
    dim, before, after = halo

    def beyond(index: int, count: int) -> Tensor:
        shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
        if edge == "repeat":
            return x.narrow(dim, index, 1).expand(shape)
        return x.new_full(shape, float("-inf") if edge == "lowest" else 0)

    left = beyond(0, before) if previous is None else previous
    right = beyond(x.shape[dim] - 1, after) if following is None else following
    return torch.cat([left, x, right], dim)


def narrowed(
    x: Tensor, halo: Halo, previous: Tensor | None, following: Tensor | None, edge: str
) -> Tensor:
    """Add the neighbours' ends to a rank's own indices; None: there is no such neighbour."""
    dim, before, after = halo
    own = x.narrow(dim, before, x.shape[dim] - before - after).clone()
    if edge == "repeat":
        left, right = (end.sum(dim, keepdim=True) for end in borders(x, halo, adds=True))
        previous = left if previous is None else previous
        following = right if following is None else following
    if previous is not None:
        own.narrow(dim, 0, previous.shape[dim]).add_(previous)
    if following is not None:
        own.narrow(dim, own.shape[dim] - following.shape[dim], following.shape[dim]).add_(following)
    return own


@irdl_op_definition
class RingSliceOp(_TurnedOp, AlongDimOp):
    """Slice out, along `dim`, the block of the rank `turn` positions further on. No traffic."""

    name = "dist.ring_slice"
    turn_attr = prop_def(NUMBER, prop_name="turn")
    turn = number_property("turn")
    value = operand_def(TENSOR)
    part = result_def(TENSOR)

    @property
    def is_view(self) -> bool:
        """True if the block is one slice of its operand, not several."""
        return shape_of(self.part)[self.dim] == self.block

    def on_shards(self, members: Sequence[Tensor]) -> list[Tensor]:
        size = len(members)
        return [
            take_blocks(x, self.dim, size, self.block, (index + self.turn) % size)
            for index, x in enumerate(members)
        ]


@irdl_op_definition
class RingJoinOp(AlongDimOp):
    """Join along `dim` the blocks that this rank held at turns 0, 1, .., P - 1. No traffic.

    Shapes: P times .. x nd x ..  ->  .. x P nd x ...
    """

    name = "dist.ring_join"
    parts = var_operands(RangeOf(TENSOR).of_length(AtLeast(1)))
    joined = result_def(TENSOR)
    JOINS_OPERANDS: ClassVar[bool] = True

    @property
    def effect(self) -> Effect:
        return Effect(gathers=self.blocks)

    def problem_on(self, mesh: Mesh) -> str | None:
        ranks, types = mesh.sizes(self.axes), {value.type for value in self.parts}
        if len(self.parts) != ranks or len(types) > 1:
            return f"it joins {len(self.parts)} blocks, expected {ranks} of one type"
        return super().problem_on(mesh)

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return [self.expected_shape(shape_of(self.parts[0]), mesh.sizes(self.axes))]

    def over_members(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [
            join_of_ring(blocks, position, self.dim, self.block)
            for position, blocks in enumerate(members)
        ]


def join_of_ring(blocks: Sequence[Tensor], position: int, dim: int, block: int) -> Tensor:
    """Concatenate, in the order of ranks, the blocks that the rank at `position` held in turn."""
    size = len(blocks)
    in_order = [blocks[(index - position) % size] for index in range(size)]
    return merge_blocks(in_order, dim, block)
