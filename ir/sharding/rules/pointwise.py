"""The rule of pointwise ops."""

from __future__ import annotations

from dataclasses import replace

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import Rule, named_rule, rule
from shardweave.ir.sharding.rules.dims import broadcast, passing


@rule
def pointwise(op: AtenOp) -> Rule:
    """`i j, i j -> i j` for any rank; operands are right-aligned, broadcast dims whole."""
    shape = shape_of(op.results[0])
    names, factors = passing(shape)
    operands = [broadcast(shape_of(operand), shape, names) for operand in op.operands]
    spec = spec_of(op)
    if spec.refuses_values and not dtype_of_value(op.operands[-1]).is_floating_point:
        # Padding may be 0, or anything.
        factors.update((n, replace(factors[n], even=True)) for dim in operands[-1] for n in dim)
    return named_rule(factors, operands, [names] * len(op.results), linear=spec.linear_in(op))
