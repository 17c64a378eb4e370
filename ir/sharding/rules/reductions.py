"""Rules of ops along dims: sums and maxima, softmaxes, scans, sorts and statistics."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import Names, Rule, named_rule, replicated_rule, rule
from shardweave.ir.sharding.rules.dims import named_dims, passing


@rule
def reduction(op: AtenOp) -> Rule:
    """`i j -> i` or, with keepdim, `i j -> i .`: j reduces."""
    kind = spec_of(op).combine
    assert kind in ("sum", "max")
    shape = shape_of(op.operands[0])
    dims = _dims_of(op)
    names, factors = passing(shape)
    for dim in dims:
        factors.update((n, replace(factors[n], reduction=kind)) for n in names[dim])
    given, wanted = dtype_of_value(op.operands[0]), dtype_of_value(op.results[0])
    linear = kind == "sum" and torch.promote_types(given, wanted) == wanted
    return named_rule(factors, [names], [_after(op, names, dims)], linear=[0] if linear else [])


@rule
def along_whole_dims(op: AtenOp) -> Rule:
    """`i . -> i .` or, if the op drops its dims, `i . -> i`."""
    dims = _dims_of(op)
    names, factors = passing(shape_of(op.operands[0]), whole=dims)
    results = [_after(op, names, dims)] * len(op.results)
    return named_rule(factors, [names] * len(op.operands), results)


def _dims_of(op: AtenOp) -> frozenset[int]:
    """The dims an op works along; an overload without the argument works along all."""
    has_dim = op.signature.parameter("dim") is not None
    return named_dims(len(shape_of(op.operands[0])), op.value("dim") if has_dim else None)


def _after(op: AtenOp, names: Names, dims: Collection[int]) -> Names:
    """The dims of the results: an op keeps the dims it works along, as a rank tells, or not."""
    if len(shape_of(op.results[0])) == len(names):
        return [() if d in dims else n for d, n in enumerate(names)]
    return [n for d, n in enumerate(names) if d not in dims]


@rule
def histogram(op: AtenOp) -> Rule:
    """`i -> .`: counts of shards add up, if the bins are known; padding would be counted too."""
    if op.value("min") == op.value("max"):
        return replicated_rule(op)  # bins from the least to the largest element
    names, factors = passing(shape_of(op.operands[0]))
    factors = {name: replace(factor, even=True) for name, factor in factors.items()}
    return named_rule(factors, [names], [[()]])
