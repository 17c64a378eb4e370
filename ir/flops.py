"""Floating-point operations of an op, from the types of its operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.ir import Operation

from shardweave.ir.aten import AtenOp
from shardweave.ir.facts import facts_of
from shardweave.ir.types import shape_of


def _matmul(op: AtenOp) -> int:
    """2 m n k for each product: the result's elements times twice the contracted dim."""
    product = facts_of(op).product
    assert product is not None
    left = op.operands[product.factors[0]]
    return 2 * math.prod(shape_of(op.results[0])) * shape_of(left)[-1]


def _convolution(op: AtenOp) -> int:
    """Each output element sums over the kernel and the input channels of its group."""
    return 2 * math.prod(shape_of(op.results[0])) * math.prod(shape_of(op.operands[1])[1:])


def _convolution_backward(op: AtenOp) -> int:
    grad, _, weight = op.operands[:3]
    forward = 2 * math.prod(shape_of(grad)) * math.prod(shape_of(weight)[1:])
    return forward * sum(bool(wanted) for wanted in op.value("output_mask")[:2])


def _attention(op: AtenOp, products: int) -> int:
    """Products of queries by keys; a causal mask is not discounted."""
    first = 1 if op.name.endswith("backward") else 0
    query, key = shape_of(op.operands[first]), shape_of(op.operands[first + 1])
    return products * 2 * math.prod(query) * key[-2]


_FLOPS: dict[str, Callable[[AtenOp], int]] = {
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.addmm": _matmul,
    "aten.baddbmm": _matmul,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda op: _attention(op, 2),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda op: _attention(op, 5),
}


def flops_of(op: Operation) -> int:
    """Multiplications and additions of matrix products, convolutions and attention; else 0."""
    count = _FLOPS.get(op.name)
    return count(op) if count is not None and isinstance(op, AtenOp) else 0
