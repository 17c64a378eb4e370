"""Collectives that send only the rows that are needed: `dist.fetch_rows` and `dist.add_rows`.

A table has its rows in plain shards over the axes. Each rank reads, or adds to, any number of rows
by their indices. `routes` (`dist.row_routes`) says which rank needs which rows: from it each rank
knows how many it sends to every other one and receives, so that no counts are sent. A row that a
rank needs several times travels once.
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
from shardweave.ir.dialects.types import TENSOR, dtype_of_value, num_elements, shape_of
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
        first, numbers, routes = self.operands
        ranks, size = shape_of(routes)[:1], mesh.sizes(self.axes)
        if len(shape_of(routes)) != 2 or dtype_of_value(routes) != torch.bool:
            return "routes must be 2-d bools, a row for each rank; give those of dist.row_routes"
        if ranks != (size,):
            return f"routes have {ranks[0]} rows, but axes {list(self.axes)} have {size} ranks"
        if len(shape_of(numbers)) != 1 or dtype_of_value(numbers) != torch.int64:
            return "the row indices must be a 1-d tensor of int64"
        given = shape_of(first)[:1]
        wanted = shape_of(numbers) if self.MAKES_TABLE else (shape_of(routes)[1] // size,)
        if given != wanted:
            return f"operand 0 has {list(given)} rows, expected {list(wanted)}"
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

    def over_members(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        for position, (first, numbers, routes) in enumerate(members):
            check_routes(numbers, routes[position], first if self.MAKES_TABLE else None)
            if not torch.equal(routes, members[0][2]):
                raise ValueError(f"{self.name}: ranks differ in their routes")
        return self.joined(members)

    def joined(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Compute each rank's result from all operands of each rank of one group."""
        raise NotImplementedError


def check_routes(numbers: Tensor, needed: Tensor, rows: Tensor | None = None) -> None:
    """Raise ValueError if a rank's row indices, `numbers`, are not among those in its routes.

    needed: the rank's row of the routes. rows: the rows to add, one for each index.
    """
    if rows is not None and rows.shape[0] != numbers.shape[0]:
        raise ValueError(
            f"{rows.shape[0]} rows are to be added at {numbers.shape[0]} row indices; give one "
            "index for each row."
        )
    if not needed[numbers].all():
        raise ValueError(
            "a rank reads or adds rows that its routes leave out; make the routes "
            "(dist.row_routes) of the same row indices, and places in rank order on its axes."
        )


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

    def joined(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        table = torch.cat([member[0] for member in members])
        return [table[member[1]] for member in members]


@irdl_op_definition
class AddRowsOp(RowsOp):
    """Add rows to a sharded table of zeros, by their numbers.

    Shapes: rows n x .., numbers n, routes P x T  ->  T/P x ...
    Traffic: as for `dist.fetch_rows`, in the other direction.
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

    def joined(self, members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        ranks, tokens = members[0][2].shape
        total = members[0][0].new_zeros((tokens, *members[0][0].shape[1:]))
        for rows, numbers, _ in members:
            total.index_add_(0, numbers, rows)
        return list(total.view(ranks, tokens // ranks, *total.shape[1:]))
