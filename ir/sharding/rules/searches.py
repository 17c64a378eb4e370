"""Rules of searches for values in a sorted list, and of reductions over segments of rows."""

from __future__ import annotations

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.sharding.rules.base import Rule, named_rule, rule
from shardweave.ir.sharding.rules.dims import passing


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
