"""Rules of products with an addition, grouped ones, factorisations, distances and cross products.

Plain products are notation alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.localizer import Localizer
from shardweave.ir.sharding.rules.base import (
    Names,
    Notation,
    Rule,
    named_rule,
    replicated_rule,
    rule,
)
from shardweave.ir.sharding.rules.dims import broadcast, dim_of, passing


@rule
def added_product(op: AtenOp) -> Rule:
    """`j, i k, k j -> i j`: k cannot be cut, for each shard would add operand 0 once more.

    Capture splits an addmm into mm and add where a plan may cut it (see `canonical`).
    """
    text = spec_of(op).notation
    names, shape = text.partition("->")[2].split(), shape_of(op.results[0])
    added = shape_of(op.operands[0])
    offset = len(shape) - len(added)
    bias = [names[offset + d] if n == shape[offset + d] else "." for d, n in enumerate(added)]
    return Notation(op, f"{' '.join(bias)}, {text}").rule(reductions={"k": None})


@rule
def grouped(op: AtenOp) -> Rule:
    """`i k, e k j, e, e -> i j`, or `i k, i j, e, e -> e k j`: shards of e have their own groups.

    Rows of other groups are zeros there: e reduces. With blocks, i is `(r i)` and e is `(r e)`, for
    each block of groups has rows of its own.
    """
    text, blocks = spec_of(op).notation, op.value("blocks")
    if blocks > 1:
        text = re.sub(r"\b[ie]\b", lambda name: f"(r {name[0]})", text)
    made = Notation(op, text, {"r": blocks}).rule(contiguous=["i"], localize=_localize_grouped)
    if blocks == 1:
        return made
    # A block of padding would have no groups.
    first, *others = made.factors
    assert first.size == blocks
    return replace(made, factors=(replace(first, even=True), *others))


def _localize_grouped(local: Localizer) -> Sequence[SSAValue]:
    """Groups begin and end where they do in the shard's rows."""
    rows, other, starts, ends = local.operands
    blocks = local.op.value("blocks")
    first, *rest = local.placements
    by_block, by_row = (first, rest[0]) if blocks > 1 else ((), first)
    blocks //= math.prod(placement.size for placement in by_block)
    if by_row:
        shard = local.shard_index(by_row)
        (start,) = local.emit(
            "aten.mul.Scalar", [shard], ((), torch.int64), other=shape_of(rows)[0] // blocks
        )
        types = [(shape_of(v), dtype_of_value(v)) for v in (starts, ends)]
        (starts,) = local.emit("aten.sub.Tensor", [starts, start], types[0])
        (ends,) = local.emit("aten.sub.Tensor", [ends, start], types[1])
    return local.clone([rows, other, starts, ends], blocks=blocks)


@rule
def matrices(op: AtenOp) -> Rule:
    """`b . ., b . . -> b . .`: each matrix of a batch by itself.

    Padding may be a matrix that has no factors, so that shards are even.
    """
    batch = shape_of(op.operands[0])[:-2]
    names, factors = passing(batch)

    def named(shape: tuple[int, ...]) -> Names:
        shared = shape[: len(batch)] == batch
        return [*names, *[()] * (len(shape) - len(batch))] if shared else [()] * len(shape)

    results = [shape_of(value) for value in op.results]
    if any(math.prod(shape) and shape[: len(batch)] != batch for shape in results):
        return replicated_rule(op)
    even = {name: replace(factor, even=True) for name, factor in factors.items()}
    operands = [named(shape_of(value)) for value in op.operands]
    return named_rule(even, operands, [named(shape) for shape in results])


@rule
def distances(op: AtenOp) -> Rule:
    """`b i ., b j . -> b i j`; its gradient `b i j, b i ., b j ., b i j -> b i .`: j reduces."""
    is_backward = len(op.operands) > 2
    first, second = op.operands[1:3] if is_backward else op.operands
    pairs = shape_of(op.operands[0] if is_backward else op.results[0])
    batch = pairs[:-2]
    if any(shape_of(value)[:-2] != batch for value in (first, second)):
        return replicated_rule(op)
    names, factors = passing(pairs)
    # A distance of 0 between two rows of padding may have no gradient.
    even = {name: replace(factor, even=True) for name, factor in factors.items()}
    rows, columns = [*names[:-1], ()], [*names[:-2], names[-1], ()]
    if is_backward:
        return named_rule(even, [names, rows, columns, names], [rows])
    return named_rule(even, [rows, columns], [names])


@rule
def cross(op: AtenOp) -> Rule:
    """`i ., i . -> i .`: the three components stay together."""
    shape = shape_of(op.results[0])
    names, factors = passing(shape, whole=[dim_of(op, len(shape))])
    operands = [broadcast(shape_of(value), shape, names) for value in op.operands]
    return named_rule(factors, operands, [names])
