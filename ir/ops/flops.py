"""Floating-point operations of an op, from the types of its operands and results."""

from __future__ import annotations

from xdsl.ir import Operation

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import num_elements, shape_of
from shardweave.ir.ops.registry import spec_of


def flops_of(op: Operation) -> int:
    """Multiplications and additions of matrix products, convolutions and attention; else 0."""
    if not isinstance(op, AtenOp):
        return 0
    spec = spec_of(op)
    if spec.flops is not None:
        return spec.flops(op)
    if spec.product is None:
        return 0
    # 2 m n k: the result's elements times twice what each sums over.
    left = shape_of(op.operands[spec.product.factors[0]])
    return 2 * num_elements(op.results[0]) * left[-1]
