"""Rules of products with an addition, of factorisations, distances and cross products.

Plain products are notation alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.registry import spec_of
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
