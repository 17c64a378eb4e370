"""Rules of ops along dims: sums, softmaxes, scans, sorts, statistics and normalisation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import part_size
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.rules.base import (
    Localize,
    Localizer,
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
    """`i j -> i`, with keepdim `i j -> i .`: shards of j give partial sums or maxima."""
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
    """`i -> .`: even shards of i give partial counts, if `min` and `max` of the bins are given."""
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
    """`... k, ... k, ... ., ... ., k, k -> ... k, k, k`: the last two are sums over `...`."""
    kept, ones = "..." + " ." * _normalized_rank(op), "." + " ." * (_normalized_rank(op) - 1)
    taken = [name for name in ("weight", "bias") if op.signature.parameter(name) is not None]
    num_parameters = sum(op.tensor(name) is not None for name in taken)
    operands = [kept] * (len(op.operands) - num_parameters) + [ones] * num_parameters
    results = [kept, ones, ones]
    wanted = [dims for dims, given in zip(results, op.value("output_mask"), strict=False) if given]
    return Notation(op, f"{', '.join(operands)} -> {', '.join(wanted)}").rule()


@rule
def group_norm(op: AtenOp) -> Rule:
    """`n (g c) y, (g c), (g c) -> n (g c) y, n g, n g`: c, a group's channels, stays unsharded.
    Shards of y add up their statistics."""
    value = _plane(op.operands[0])
    operands = [value, *["(g c)"] * (len(op.operands) - 1)]
    return _grouped(op, operands, [value, "n g", "n g"], _group_norm_on_shards, joined=True)


@rule
def group_norm_backward(op: AtenOp) -> Rule:
    """`n (g c) y, n (g c) y, n g, n g, (g c) -> n (g c) y, (g c), (g c)`; the last two are sums
    over n and y."""
    value = _plane(op.operands[0])
    operands = [value, value, "n g", "n g", *["(g c)"] * (len(op.operands) - 4)]
    results = zip([value, "(g c)", "(g c)"], op.value("output_mask"), strict=True)
    made = [dims for dims, wanted in results if wanted]
    return _grouped(op, operands, made, _group_norm_backward_on_shards)


def _plane(value: SSAValue) -> str:
    return " ".join(["n (g c)", *(f"y{dim}" for dim in range(2, len(shape_of(value))))])


def _grouped(
    op: AtenOp, operands: list[str], results: list[str], localize: Localize, *, joined: bool = False
) -> Rule:
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    spatial = [f"y{dim}" for dim in range(2, len(shape_of(op.operands[0])))]
    # Every text starts with `n (g c)`, so g is factor 1, and y is factor 3 and those after it.
    return Notation(op, text, {"g": op.value("group")}).rule(
        whole=["c"], even=spatial, joined=spatial if joined else (), localize=localize
    )


@dataclass(frozen=True)
class _Groups:
    """Emits a group norm on spatial shards, with statistics from all-reduced sums."""

    local: Localizer
    axes: tuple[str, ...]
    dtype: torch.dtype
    """The dtype of the statistics, in which all is computed."""
    shape: tuple[int, ...]
    groups: tuple[int, int, int]
    """Samples, groups, and the group's elements on a shard."""
    count: int
    """Elements of a group on all shards."""

    @staticmethod
    def of(local: Localizer, dtype: torch.dtype) -> _Groups | None:
        """Read a local form; None if no spatial dim is sharded."""
        placed = [p for cut in local.placements[3:] for p in cut]
        shape = shape_of(local.operands[0])
        group = part_size(local.placements[1], local.op.value("group"))
        numel = prod(shape[1:]) // group
        groups, count = (shape[0], group, numel), numel * prod(p.size for p in placed)
        axes = tuple([name for name in local.mesh.names if name in {p.axis for p in placed}])
        return _Groups(local, axes, dtype, shape, groups, count) if placed else None

    def emit(self, name: str, *operands: SSAValue, **values: Any) -> SSAValue:
        """Add an elementwise op, whose result has the first operand's shape."""
        type_ = shape_of(operands[0]), self.dtype
        return self.local.emit(f"aten.{name}", operands, type_, **values)[0]

    def view(self, value: SSAValue, shape: Sequence[int]) -> SSAValue:
        return self.local.emit("aten.view", [value], (shape, dtype_of_value(value)))[0]

    def grouped(self, value: SSAValue) -> SSAValue:
        """Reshape a value to (samples, groups, elements), in the statistics' dtype."""
        if dtype_of_value(value) != self.dtype:
            value = self.emit("_to_copy", value)
        return self.view(value, self.groups)

    def column(self, value: SSAValue) -> SSAValue:
        """Reshape one number per group (or, if 1-D, per channel) to broadcast over elements."""
        if len(shape_of(value)) > 1:
            return self.view(value, (*self.groups[:2], 1))
        if dtype_of_value(value) != self.dtype:
            value = self.emit("_to_copy", value)
        return self.view(value, (self.shape[1], *(1 for _ in self.shape[2:])))

    def sums(self, *values: SSAValue) -> list[SSAValue]:
        """Sum each value over a group's elements on all shards."""
        type_ = self.groups[:2], self.dtype
        own = [self.local.emit("aten.sum.dim_IntList", [v], type_, dim=[2])[0] for v in values]
        return self.local.all_reduce(own, self.axes)

    def as_result(self, value: SSAValue) -> SSAValue:
        """Convert a value to the operand's shape and dtype."""
        value, dtype = self.view(value, self.shape), dtype_of_value(self.local.operands[0])
        if dtype == self.dtype:
            return value
        return self.local.emit("aten._to_copy", [value], (self.shape, dtype))[0]


def _group_norm_on_shards(local: Localizer) -> Sequence[SSAValue]:
    at = _Groups.of(local, dtype_of_value(local.op.results[1]))
    if at is None:
        return dividing("group", 1)(local)
    x, *parameters = local.operands
    x = at.grouped(x)
    mean = at.emit("div.Scalar", *at.sums(x), other=at.count)
    x = at.emit("sub.Tensor", x, at.column(mean))
    variance = at.emit("div.Scalar", *at.sums(at.emit("mul.Tensor", x, x)), other=at.count)
    rstd = at.emit("rsqrt", at.emit("add.Scalar", variance, other=local.op.value("eps")))
    x = at.view(at.emit("mul.Tensor", x, at.column(rstd)), at.shape)
    by_parameter = {"weight": "mul.Tensor", "bias": "add.Tensor"}
    steps = [step for name, step in by_parameter.items() if local.op.tensor(name) is not None]
    for step, parameter in zip(steps, parameters, strict=True):
        x = at.emit(step, x, at.column(parameter))
    return [at.as_result(x), mean, rstd]


def _group_norm_backward_on_shards(local: Localizer) -> Sequence[SSAValue]:
    grad, x, mean, rstd, *weight = local.operands
    at = _Groups.of(local, dtype_of_value(mean))
    if at is None:
        return dividing("group", 1)(local)
    scale, by_channel = at.column(rstd), at.view(at.grouped(grad), at.shape)
    x = at.emit("mul.Tensor", at.emit("sub.Tensor", at.grouped(x), at.column(mean)), scale)
    made: list[SSAValue] = []
    of_x, of_weight, of_bias = local.op.value("output_mask")
    if of_x:
        own = by_channel
        for parameter in weight:
            own = at.emit("mul.Tensor", own, at.column(parameter))
        own = at.view(own, at.groups)
        total, along = (at.column(s) for s in at.sums(own, at.emit("mul.Tensor", own, x)))
        both = at.emit("add.Tensor", at.emit("mul.Tensor", x, along), total)
        own = at.emit("sub.Tensor", own, at.emit("div.Scalar", both, other=at.count))
        made.append(at.as_result(at.emit("mul.Tensor", own, scale)))
    dims = [0, *range(2, len(at.shape))]
    for term in [at.emit("mul.Tensor", by_channel, at.view(x, at.shape))] * of_weight + [
        by_channel
    ] * of_bias:
        shape, dtype = local.result_shape(-1), dtype_of_value(local.op.results[-1])
        (total,) = local.emit("aten.sum.dim_IntList", [term], (shape, at.dtype), dim=dims)
        if dtype != at.dtype:
            (total,) = local.emit("aten._to_copy", [total], (shape, dtype))
        made.append(total)
    return made
