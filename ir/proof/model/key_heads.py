"""Attention of queries that share heads of keys, as one in which each query has its own.

The head of keys that a query head reads is its index over the number that share one; so attention
on keys and values selected by that index is the same, and the gradient of what was selected adds
up, by the same index, to that of what it was selected from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from xdsl.ir import Attribute, Block

from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.ops.registry import first_of_attention

HEADS = 1
"""The dim of heads."""

FormOf = Callable[[AtenOp, Sequence[int]], list[int]]
Alias = tuple[AtenOp, list[int], list[int]]
"""An op, the numbers of its operands, and those of its results, which are known already."""


def repeated_heads(
    op: AtenOp, operands: Sequence[int], results: Sequence[int], form: FormOf
) -> Iterator[Alias]:
    """Other ops that give the results of an attention whose queries share heads of keys."""
    first = first_of_attention(op)
    heads = shape_of(op.operands[first])[HEADS]
    shared = heads // shape_of(op.operands[first + 1])[HEADS]
    (index,) = form(range_to(heads), [])
    count: Attribute = tensor_type((heads,), torch.int64)
    mode = {"other": shared, "rounding_mode": "floor"}
    (index,) = form(_op("aten.div.Scalar_mode", [count], count, **mode), [index])
    types, numbers = [value.type for value in op.operands], list(operands)
    for at in (first + 1, first + 2):
        shape = list(shape_of(op.operands[at]))
        shape[HEADS] = heads
        wide = tensor_type(shape, dtype_of_value(op.operands[at]))
        select = _op("aten.index_select", [types[at], count], wide, dim=HEADS)
        (numbers[at],) = form(select, [numbers[at], index])
        types[at] = wide
    made = list(op.result_types)
    if first:
        made[1:] = types[first + 1 : first + 3]
    block = Block(arg_types=types)
    wide_op = type(op).create(operands=block.args, result_types=made, properties=op.properties)
    if not first:
        yield wide_op, numbers, list(results)
        return
    gradients = form(wide_op, numbers)
    yield wide_op, numbers, [results[0], *gradients[1:]]
    for at in (1, 2):
        narrow = op.results[at].type
        back = _op("aten.index_select_backward", [made[at], count], narrow, dim=HEADS)
        yield back, [gradients[at], index], [results[at]]


def range_to(count: int) -> AtenOp:
    """The numbers from 0 up to a count."""
    return _op("aten.arange.start_step", [], tensor_type((count,), torch.int64), start=0, step=1)


def _op(name: str, operands: Sequence[Attribute], result: Attribute, **values: Any) -> AtenOp:
    return create(name, Block(arg_types=operands).args, [result], values)
