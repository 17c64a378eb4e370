"""Rules of ops that create a tensor without operands, of pointwise ops, and of searches for values
in a sorted list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import (
    Localizer,
    Notation,
    Rule,
    named_rule,
    replicated_rule,
    rule,
)
from shardweave.ir.sharding.rules.dims import broadcast, passing


@rule
def pointwise(op: AtenOp) -> Rule:
    """`i j, i j -> i j` for any rank; operands are right-aligned, broadcast dims have no factor."""
    shape = shape_of(op.results[0])
    names, factors = passing(shape)
    operands = [broadcast(shape_of(operand), shape, names) for operand in op.operands]
    spec = spec_of(op)
    if spec.refuses_values and not dtype_of_value(op.operands[-1]).is_floating_point:
        # Padding may be 0, or anything.
        factors.update((n, replace(factors[n], even=True)) for dim in operands[-1] for n in dim)
    return named_rule(factors, operands, [names] * len(op.results), linear=spec.linear_in(op))


@rule
def full(op: AtenOp) -> Rule:
    """`-> i j` for any number of dims: each device fills its own shard."""
    names, factors = passing(shape_of(op.results[0]))
    return named_rule(factors, [], [names])


@rule
def arange(op: AtenOp) -> Rule:
    """`-> i`; a shard counts from its own first index."""
    if not isinstance(op.value("start"), int) or not isinstance(op.value("step"), int):
        # A shard of a range of fractions would be rounded differently from the range.
        return replicated_rule(op)
    return Notation(op, "-> i").rule(contiguous=["i"], localize=_localize_arange)


def _localize_arange(local: Localizer) -> Sequence[SSAValue]:
    (length,) = local.result_shape(0)
    stride = length * local.op.value("step")
    shard = local.shard_index(local.placements[0])
    offset = local.emit("aten.mul.Scalar", [shard], ((), torch.int64), other=stride)
    range_ = local.clone()
    dtype = dtype_of_value(local.op.results[0])
    return local.emit("aten.add.Tensor", [*range_, *offset], ((length,), dtype))


@rule
def random(op: AtenOp) -> Rule:
    """`., i, j -> i j` for any number of dims: a random number depends only on its positions."""
    names, factors = passing(shape_of(op.results[0]))
    positions = [[dim] for dim in names]
    return named_rule(factors, [[()], *positions], [names])


# Searches, and reductions over segments of rows


@rule
def among_boundaries(op: AtenOp) -> Rule:
    """`i, . -> i`: each value of operand 0 is compared with all values of operand 1."""
    names, factors = passing(shape_of(op.operands[0]))
    return named_rule(factors, [names, [()] * len(shape_of(op.operands[1]))], [names])


@rule
def searchsorted(op: AtenOp) -> Rule:
    """`., i -> i`, or by rows `b ., b i -> b i`: each value of operand 1 is searched on its own."""
    names, factors = passing(shape_of(op.operands[1]))
    row = [()] if len(shape_of(op.operands[0])) == 1 else [*names[:-1], ()]
    return named_rule(factors, [row, names, *[row] * (len(op.operands) - 2)], [names])


@rule
def segments(op: AtenOp) -> Rule:
    """`. h, . -> . h`: dims of rows, and of segments' lengths or offsets, cannot be sharded."""
    num_whole = len(shape_of(op.operands[-1]))
    names, factors = passing(shape_of(op.operands[0]), whole=range(num_whole))
    is_data = [dtype_of_value(v).is_floating_point for v in op.operands]
    operands = [names if data else [()] * num_whole for data in is_data]
    return named_rule(factors, operands, [names])
