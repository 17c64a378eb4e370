"""Collectives that send only the rows that are needed: `dist.fetch_rows` and `dist.add_rows`.

A table has its rows in plain shards over the axes. Each rank reads rows by their numbers, or adds
to them, of any number. `routes` (`dist.row_routes`) says which rank needs which rows: from it each
rank knows how many it sends to every other one and receives, so that no counts are sent. A row
that a rank needs several times travels once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor
from xdsl.dialects.builtin import ArrayAttr
from xdsl.irdl import irdl_op_definition, operand_def, result_def

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.dist_base import CollectiveOp
from shardweave.ir.dialects.types import TENSOR, num_elements, shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding


class RowsOp(CollectiveOp):
    """Base of the ops on sharded tables. Operands: rows or a table, row numbers, and routes.

    MAKES_TABLE: whether the result is the table.
    """

    ALL_PAIRS: ClassVar[bool] = True
    MAKES_TABLE: ClassVar[bool] = False
    JOINS_OPERANDS: ClassVar[bool] = True

    def problem_on(self, mesh: Mesh) -> str | None:
        ranks, size = shape_of(self.operands[2])[0], mesh.sizes(self.axes)
        if len(shape_of(self.operands[2])) != 2 or ranks != size:
            return f"routes are those of {ranks} ranks, but {list(self.axes)} join {size}"
        return super().problem_on(mesh)

    def after(self, sharding: Sharding, mesh: Mesh) -> Sharding:
        """The sharding that the op declares, since no operand implies the result's number of rows.
        Raises ValueError if the table's rows are not sharded over `axes`, in this order."""
        written = cast("ArrayAttr[ShardingAttr] | None", self.properties.get("sharding"))
        made = sharding
        if written is not None:
            made = written.data[0].on_local(shape_of(self.results[0]), mesh)
        rows = (made if self.MAKES_TABLE else sharding).dims[0]
        if written is not None and tuple(placement.axis for placement in rows) != self.axes:
            raise ValueError(
                f"dim 0 of the table must be sharded over the axes {list(self.axes)}, in this "
                "order; correct its sharding"
            )
        return made

    def sent_elements(self, mesh: Mesh) -> float:
        """Estimate the elements that one rank sends, with balanced routes: each row once to each
        rank that needs it."""
        ranks, tokens = shape_of(self.operands[2])
        width = num_elements(self.operands[0]) / max(shape_of(self.operands[0])[0], 1)
        needed = tokens * (1 - (1 - 1 / tokens) ** shape_of(self.operands[1])[0])
        return needed * width * (ranks - 1) / ranks


@irdl_op_definition
class FetchRowsOp(RowsOp):
    """Read rows of a sharded table by their numbers.

    Shapes: table T/P x .., numbers n, routes P x T  ->  n x ...
    Traffic: each row once to each other rank that needs it.
    """

    name = "dist.fetch_rows"
    table = operand_def(TENSOR)
    numbers = operand_def(TENSOR)
    routes = operand_def(TENSOR)
    rows = result_def(TENSOR)

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        return [(*shape_of(self.operands[1]), *shape_of(self.operands[0])[1:])]

    def over_members(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        table = torch.cat([member[0] for member in members])
        return [table[member[1]] for member in members]


@irdl_op_definition
class AddRowsOp(RowsOp):
    """Add rows to a sharded table of zeros, by their numbers.

    Shapes: rows n x .., numbers n, routes P x T  ->  T/P x ...
    Traffic: that of `dist.fetch_rows`, in the other direction.
    """

    name = "dist.add_rows"
    MAKES_TABLE: ClassVar[bool] = True
    rows = operand_def(TENSOR)
    numbers = operand_def(TENSOR)
    routes = operand_def(TENSOR)
    table = result_def(TENSOR)

    def expected_shapes(self, mesh: Mesh) -> list[tuple[int, ...]]:
        ranks, tokens = shape_of(self.operands[2])
        return [(tokens // ranks, *shape_of(self.operands[0])[1:])]

    def over_members(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        ranks, tokens = members[0][2].shape
        total = members[0][0].new_zeros((tokens, *members[0][0].shape[1:]))
        for rows, numbers, _ in members:
            total.index_add_(0, numbers, rows)
        return list(total.view(ranks, tokens // ranks, *total.shape[1:]))
