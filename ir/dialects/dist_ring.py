"""Ops of products that are decomposed over a ring: `dist.shift`, `ring_slice` and `ring_join`.

At turn t the rank at position r holds the block of the rank at position r + t (modulo P). No
sharding expresses this, so the results of a shift and of a ring slice carry none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from xdsl.irdl import AtLeast, RangeOf, irdl_op_definition, operand_def, prop_def, result_def
from xdsl.irdl import var_operand_def as var_operands

from shardweave.ir.dialects.dist_base import NUMBER, AlongDimOp, CollectiveOp, OverAxesOp
from shardweave.ir.dialects.types import TENSOR, shape_of
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


@irdl_op_definition
class RingSliceOp(_TurnedOp, AlongDimOp):
    """Slice out, along `dim`, the block of the rank `turn` positions further on. No traffic."""

    name = "dist.ring_slice"
    turn_attr = prop_def(NUMBER, prop_name="turn")
    value = operand_def(TENSOR)
    part = result_def(TENSOR)

    @property
    def is_view(self) -> bool:
        """True if the block is one slice of its operand, not several."""
        return shape_of(self.part)[self.dim] == self.block

    @property
    def turn(self) -> int:
        return self.turn_attr.value.data

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
    """Join the blocks that the rank at `position` held in turn, by the positions of their ranks."""
    size = len(blocks)
    in_order = [blocks[(index - position) % size] for index in range(size)]
    return merge_blocks(in_order, dim, block)
