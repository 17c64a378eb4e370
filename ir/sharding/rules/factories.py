"""Rules of ops that make a tensor out of nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.sharding.rules.base import (
    Localizer,
    Notation,
    Rule,
    named_rule,
    replicated_rule,
    rule,
)
from shardweave.ir.sharding.rules.dims import passing


@rule
def full(op: AtenOp) -> Rule:
    """`-> i j` for any rank: each device fills its own part."""
    names, factors = passing(shape_of(op.results[0]))
    return named_rule(factors, [], [names])


@rule
def arange(op: AtenOp) -> Rule:
    """`-> i`; a shard counts from its own first index."""
    if not isinstance(op.value("start"), int) or not isinstance(op.value("step"), int):
        # A shard of a range of fractions would round otherwise than the range itself.
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
    """`., i, j -> i j` for any rank: a number depends on its positions alone."""
    names, factors = passing(shape_of(op.results[0]))
    positions = [[dim] for dim in names]
    return named_rule(factors, [[()], *positions], [names])
