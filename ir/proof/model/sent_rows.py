"""Rows that are sent, as what they mean: `dist.fetch_rows` and `dist.add_rows` written out.

Fetching is a gather of the whole table and a lookup; adding is the gradient of a lookup, whose
shards are summed and scattered.
"""

from __future__ import annotations

from xdsl.ir import Operation
from xdsl.rewriter import Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import set_sharding_attrs, sharding_attrs_of
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist_base import StartedOp
from shardweave.ir.dialects.dist_rows import AddRowsOp, FetchRowsOp, RowsOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts, parts_of


def with_whole_tables(program: Program) -> Program:
    """The program with tables that are gathered and scattered; itself if it sends no rows."""
    if not any(isinstance(op, RowsOp) for op in ops_of_parts(program)):
        return program
    program = program.clone()
    for part in parts_of(program):
        for op in list(part.ops):
            if isinstance(op, FetchRowsOp):
                _gather(op)
            elif isinstance(op, AddRowsOp):
                _scatter(op)
    return program


def _gather(op: FetchRowsOp) -> None:
    table, numbers, routes = op.operands
    size, *rest = shape_of(table)
    type_ = tensor_type((shape_of(routes)[1], *rest), dtype_of_value(table))
    new = Builder.before(op)
    whole = dist.create_dist(
        dist.AllGatherOp, [table], [type_], axes=list(op.axes), dim=0, block=size
    )
    new.insert(whole)
    rows = create("aten.index.Tensor", [whole.results[0], [numbers]], [op.results[0].type])
    new.insert(rows, op.results[0])
    _replace(op, rows)


def _scatter(op: AddRowsOp) -> None:
    rows, numbers, routes = op.operands
    shape = shape_of(routes)[1], *shape_of(rows)[1:]
    new = Builder.before(op)
    whole = create(
        "aten.embedding_dense_backward", [rows, numbers],
        [tensor_type(shape, dtype_of_value(rows))],
        {"padding_idx": -1, "scale_grad_by_freq": False},
    )  # fmt: skip
    new.insert(whole)
    made = dist.create_dist(
        dist.ReduceScatterOp, [whole.results[0]], [op.results[0].type], axes=list(op.axes), dim=0,
        block=shape_of(op.results[0])[0],
    )  # fmt: skip
    new.insert(made, op.results[0])
    _replace(op, made)


def _replace(op: RowsOp, made: Operation) -> None:
    """Put what an op means in its place, and in that of the wait for it."""
    set_sharding_attrs(made, sharding_attrs_of(op))
    waits = [use.operation for use in op.results[0].uses] if isinstance(op, StartedOp) else []
    for done in (*waits, op):
        done.results[0].replace_all_uses_with(made.results[0])
        Rewriter.erase_op(done)
