"""Floating-point operations of an op, from the types of its operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.ir import Operation

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import num_elements, shape_of
from shardweave.ir.library.positional_attention import ATTENTION, ATTENTION_BACKWARD
from shardweave.ir.ops.facts import Product, facts_of


def _product(op: AtenOp, product: Product) -> int:
    """2 m n k for each product: the result's elements times twice what each sums over.

    A convolution sums over the kernel and the input channels of its group.
    """
    left, right = (shape_of(op.operands[index]) for index in product.factors)
    summed = math.prod(right[1:]) if op.name == "aten.convolution" else left[-1]
    return 2 * num_elements(op.results[0]) * summed


def _convolution_backward(op: AtenOp) -> int:
    grad, _, weight = op.operands[:3]
    forward = 2 * num_elements(grad) * math.prod(shape_of(weight)[1:])
    return forward * sum(bool(wanted) for wanted in op.value("output_mask")[:2])


def _attention(op: AtenOp, products: int) -> int:
    """Products of queries by keys; a causal mask is not discounted."""
    first = 1 if op.name.endswith("backward") else 0
    query, key = shape_of(op.operands[first]), shape_of(op.operands[first + 1])
    return products * 2 * math.prod(query) * key[-2]


_FLOPS: dict[str, Callable[[AtenOp], int]] = {
    "aten.convolution_backward": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda op: _attention(op, 2),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda op: _attention(op, 5),
    ATTENTION: lambda op: _attention(op, 2),
    ATTENTION_BACKWARD: lambda op: _attention(op, 5),
}


def flops_of(op: Operation) -> int:
    """Multiplications and additions of matrix products, convolutions and attention; else 0."""
    if not isinstance(op, AtenOp):
        return 0
    product, count = facts_of(op).product, _FLOPS.get(op.name)
    if product is not None:
        return _product(op, product)
    return 0 if count is None else count(op)


def is_attention(op: Operation) -> bool:
    """Whether an op is fused attention, forward or backward."""
    return op.name in _FLOPS and "attention" in op.name
