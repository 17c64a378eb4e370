"""Canonical forms of scatter-adds, gathers and grouped matrix products.

A grouped product multiplies each group of rows by the group's own matrix. Mixtures of experts that
sort tokens by expert use `aten._grouped_mm` or ops that Hugging Face and torchtitan register
instead.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.builder import ImportBuilder
from shardweave.ir.capture.canonical.base import Call, CanonicalError, Result, form
from shardweave.ir.dialects.aten import maker
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.library.grouped import GROUPED_MM, GROUPED_OUTER


@form("aten._grouped_mm")
def _grouped_mm(call: Call) -> Result:
    """Write a product whose groups lie along the rows, the columns or the contracted dim."""
    b, left, right, ends = call.builder, call["self"], call["mat2"], call["offs"]
    if call["bias"] is not None:
        raise CanonicalError(
            "aten._grouped_mm cannot have a bias in a program; add it to the result."
        )
    ranks = len(shape_of(left)), len(shape_of(right))
    if ranks == (3, 3):
        product = b.call("aten.bmm", left, right)
    elif ranks == (2, 3):
        product = _product(b, GROUPED_MM, left, right, ends)
    elif ranks == (2, 2):
        product = _product(b, GROUPED_OUTER, b.permute(left, (1, 0)), right, ends)
    else:
        columns = _product(
            b, GROUPED_MM, b.permute(right, (1, 0)), b.permute(left, (0, 2, 1)), ends
        )
        product = b.permute(columns, (1, 0))
    return b.cast(product, call.dtype)


@form("transformers.grouped_mm_fallback")
def _fallback(call: Call) -> Result:
    return _product(call.builder, GROUPED_MM, call["input"], call["weight"], call["offs"])


@form("transformers.grouped_mm_fallback_backward")
def _fallback_backward(call: Call) -> Result:
    """Compute the gradients of a grouped product's rows and weights."""
    b, grad, ends = call.builder, call["grad_output"], call["offs"]
    turned = b.permute(call["weight"], (0, 2, 1))
    return [
        _product(b, GROUPED_MM, grad, turned, ends),
        _product(b, GROUPED_OUTER, call["input"], grad, ends),
    ]


def _product(
    b: ImportBuilder, name: str, rows: SSAValue, other: SSAValue, ends: SSAValue
) -> SSAValue:
    groups = shape_of(ends)[0]
    return b.call(name, rows, other, _starts(b, ends), ends, groups=groups)


def _starts(b: ImportBuilder, ends: SSAValue) -> SSAValue:
    """Return each group's first row, which is the end of the previous group, by one op for all
    products with these `ends`."""
    for use in ends.uses:
        if use.operation.name == "aten.constant_pad_nd":
            return use.operation.results[0]
    return b.call("aten.constant_pad_nd", ends, pad=[1, -1], value=0)


@form("torchtitan.deterministic_scatter_add")
def _deterministic_scatter_add(call: Call) -> Result:
    return _added_rows(call, call["out"], call["index"], call["src"], dim=0)


@form("aten.scatter_add")
def _scatter_add(call: Call) -> Result:
    return _added_rows(call, call["self"], call["index"], call["src"], dim=call["dim"])


@form("aten.gather")
def _gather(call: Call) -> Result:
    """Write a gather of whole rows, the gradient of their scatter-add, as a row lookup."""
    table, index = call["self"], call["index"]
    rows = _rows_of(index) if call["dim"] == 0 else None
    if rows is None or len(shape_of(table)) != 2 or shape_of(table)[1] != shape_of(index)[1]:
        return call.add("aten.gather", [table, index], {"dim": call["dim"]})
    return call.builder.call("aten.index.Tensor", table, [rows])


def _added_rows(call: Call, base: SSAValue, index: SSAValue, source: SSAValue, dim: int) -> Result:
    """Scatter-add `source` into `base`: the gradient of a lookup if whole rows go to zeros."""
    rows = _rows_of(index) if dim == 0 and is_zeros(base) else None
    if rows is None or shape_of(index) != shape_of(source):
        return call.add("aten.scatter_add", [base, index, source], {"dim": dim})
    return gradient_of_lookup(call, rows, source)


def gradient_of_lookup(call: Call, rows: SSAValue, source: SSAValue) -> Result:
    """Add up the rows of `source` that have equal entries in `rows`: the gradient of a lookup."""
    b, shape = call.builder, call.shape
    width = prod(shape[1:])
    flat = b.view(source, (*shape_of(rows), width))
    values: dict[str, Any] = {"padding_idx": -1, "scale_grad_by_freq": False}
    total = b.add(
        "aten.embedding_dense_backward", [flat, rows], [tensor_type((shape[0], width), call.dtype)],
        values,
    ).results[0]  # fmt: skip
    return b.view(total, shape)


def is_zeros(value: SSAValue) -> bool:
    """True if a value is the result of an `aten.full` of 0 in a floating-point dtype."""
    made = maker(value, "aten.full")
    is_zero = made is not None and made.value("fill_value") == 0
    return is_zero and dtype_of_value(value).is_floating_point


def _rows_of(index: SSAValue) -> SSAValue | None:
    """Return the row indices (1-d) that a 2-d index repeats in each column; None if it does not."""
    expanded = maker(index, "aten.expand")
    if expanded is None or len(shape_of(index)) != 2:
        return None
    column, num_rows = expanded.operands[0], shape_of(index)[0]
    if shape_of(column) != (num_rows, 1) or dtype_of_value(column) != torch.int64:
        return None
    view = maker(column, "aten.view")
    return view.operands[0] if view and shape_of(view.operands[0]) == (num_rows,) else None
