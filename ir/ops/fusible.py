"""Roles of ATen ops in a generated kernel.

Pointwise ops, views and moves make elements of others; reductions are of rows or of columns
(`reductions_of`). Which of them fit in one kernel together: `ir.program.iteration_space`.
"""

from __future__ import annotations

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, is_float8, num_elements, shape_of
from shardweave.ir.ops.records.normalization import LAYER_NORM_BACKWARD
from shardweave.ir.ops.records.reductions import reductions_over_dims
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.ops.spec import Reduction, Role
from shardweave.ir.ops.strides import dense_strides, expected_strides

MAX_OPS = 96
MAX_NUMEL = 2**31 - 2**17
"""Most elements of a value, so that 32-bit indices suffice for a last block that reaches beyond."""

MAX_VALUES = 32
"""Most inputs and outputs of one kernel."""

FEW_ROWS = 16
"""Most rows that one instance of a columns kernel holds at once, so that its sums are complete."""

GROUP = 16
"""Number of elements that is a multiple of 16 bytes (a thread's read) in every dtype."""


def role_of(op: Operation) -> Role | None:
    """The role that an op can have in a kernel; None if no kernel can contain it."""
    spec = spec_of(op)
    if spec.role is None or not isinstance(op, AtenOp):
        return None
    values = (*op.operands, *op.results)
    if not all(0 < num_elements(value) <= MAX_NUMEL for value in values):
        return None
    if any(is_float8(dtype_of_value(value)) for value in values):
        return None
    return spec.role if spec.fits is None or spec.fits(op) else None


def reductions_of(op: AtenOp) -> tuple[Reduction, ...]:
    """The reductions that an op computes; none if its dims are neither trailing nor leading."""
    reductions = spec_of(op).reductions
    return () if reductions is None else reductions(op)


def column_results(op: AtenOp) -> list[SSAValue]:
    """The results of an op that are reductions of columns."""
    if op.name == LAYER_NORM_BACKWARD:
        first = int(bool(op.value("output_mask")[0]))
        return list(op.results[first:])
    reductions = reductions_of(op) if role_of(op) == "reduce" else ()
    return list(op.results) if any(r.over == "column" for r in reductions) else []


def sums_few_rows(op: Operation) -> bool:
    """True if an op sums a few rows, dense in memory, into one row. Generated code that combines
    partial results does this too, so that the op needs no kernel."""
    if spec_of(op).reductions is not reductions_over_dims or not isinstance(op, AtenOp):
        return False
    rows = op.operands[0]
    is_dense = expected_strides(rows) == dense_strides(shape_of(rows))
    return is_dense and any(
        r.over == "column" and r.numel // r.size <= FEW_ROWS and r.size % GROUP == 0
        for r in reductions_of(op)
    )
