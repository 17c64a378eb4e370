"""Rules of ops along dims: sums, softmaxes, scans, sorts, statistics and normalisation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import (
    Names,
    Notation,
    Rule,
    named_rule,
    replicated_rule,
    rule,
)
from shardweave.ir.sharding.rules.dims import dividing, named_dims, passing


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


@rule
def norms_of_slices(op: AtenOp) -> Rule:
    """`i . -> i .`: the norm of each slice along i; only i can be sharded."""
    shape = shape_of(op.operands[0])
    names, factors = passing(shape, whole={*range(len(shape))} - {op.value("dim") % len(shape)})
    return named_rule(factors, [names], [names])


def _dims_of(op: AtenOp) -> frozenset[int]:
    """The dims that an op works along: its argument `dim`, or all dims if it has none."""
    has_dim = op.signature.parameter("dim") is not None
    return named_dims(len(shape_of(op.operands[0])), op.value("dim") if has_dim else None)


def _after(op: AtenOp, names: Names, dims: Collection[int]) -> Names:
    """Factor names of a result: the reduced `dims` have size 1 (keepdim) or are dropped."""
    if len(shape_of(op.results[0])) == len(names):
        return [() if d in dims else n for d, n in enumerate(names)]
    return [n for d, n in enumerate(names) if d not in dims]


@rule
def histogram(op: AtenOp) -> Rule:
    """`i -> .`: shards of i give partial counts, if bins are given; must be even, without
    padding."""
    if op.value("min") == op.value("max"):
        return replicated_rule(op)  # bins from the least to the largest element
    names, factors = passing(shape_of(op.operands[0]))
    factors = {name: replace(factor, even=True) for name, factor in factors.items()}
    return named_rule(factors, [names], [[()]])


def _normalized_rank(op: AtenOp) -> int:
    derive = spec_of(op).derived.get("normalized_shape")
    return len(derive(op) if derive else op.value("normalized_shape"))


@rule
def layer_norm(op: AtenOp) -> Rule:
    """`... k, k, k -> ... k, ... ., ... .`: k, the normalized dims, cannot be sharded."""
    kept, ones = "..." + " ." * _normalized_rank(op), "." + " ." * (_normalized_rank(op) - 1)
    operands = [kept, *[ones] * (len(op.operands) - 1)]
    return Notation(op, f"{', '.join(operands)} -> {', '.join([kept] * len(op.results))}").rule()


@rule
def layer_norm_backward(op: AtenOp) -> Rule:
    """`... k, ... k, ... ., ... ., k, k -> ... k, k, k`: shards of `...` sum up the last two."""
    kept, ones = "..." + " ." * _normalized_rank(op), "." + " ." * (_normalized_rank(op) - 1)
    taken = [name for name in ("weight", "bias") if op.signature.parameter(name) is not None]
    num_parameters = sum(op.tensor(name) is not None for name in taken)
    operands = [kept] * (len(op.operands) - num_parameters) + [ones] * num_parameters
    results = [kept, ones, ones]
    wanted = [dims for dims, given in zip(results, op.value("output_mask"), strict=False) if given]
    return Notation(op, f"{', '.join(operands)} -> {', '.join(wanted)}").rule()


@rule
def group_norm(op: AtenOp) -> Rule:
    """`n (g c) ., (g c), (g c) -> n (g c) ., n g, n g`: c, a group's channels, stays unsharded."""
    value = "n (g c)" + " ." * (len(shape_of(op.operands[0])) - 2)
    operands = [value, *["(g c)"] * (len(op.operands) - 1)]
    return _grouped(op, operands, [value, "n g", "n g"])


@rule
def group_norm_backward(op: AtenOp) -> Rule:
    """`n (g c) ., n (g c) ., n g, n g, (g c) -> n (g c) ., (g c), (g c)`; n is summed over."""
    value = "n (g c)" + " ." * (len(shape_of(op.operands[0])) - 2)
    operands = [value, value, "n g", "n g", *["(g c)"] * (len(op.operands) - 4)]
    results = zip([value, "(g c)", "(g c)"], op.value("output_mask"), strict=True)
    return _grouped(op, operands, [dims for dims, wanted in results if wanted])


def _grouped(op: AtenOp, operands: list[str], results: list[str]) -> Rule:
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    # Every text starts with `n (g c)`, so g is factor 1.
    return Notation(op, text, {"g": op.value("group")}).rule(
        whole=["c"], localize=dividing("group", 1)
    )
