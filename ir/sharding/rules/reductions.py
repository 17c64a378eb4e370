"""Rules of ops along dims: sums and maxima, softmaxes, scans, sorts and statistics."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import Reduction
from shardweave.ir.sharding.rules.base import Names, Rule, named_rule, rule
from shardweave.ir.sharding.rules.dims import named_dims, passing

REDUCED: dict[str, Reduction] = {
    "aten.sum": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.amax": "max",
    "aten.max": "max",
}
"""Reductions whose results on shards combine into the result."""

WHOLE = """
    _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data
    cumsum cumprod logcumsumexp cummax cummin logsumexp
    all all.dim all.dims any any.dim any.dims amin min max.dim min.dim prod prod.dim_int
    argmax argmin argsort kthvalue median.dim mode sort sort.stable topk
    mean mean.dim var.correction var_mean.correction std.correction std_mean.correction
    linalg_vector_norm _fft_c2c _fft_c2r _fft_r2c
""".split()
"""Ops that need their dims whole on every device."""


@rule(*REDUCED)
def reduction(op: AtenOp) -> Rule:
    """`i j -> i` or, with keepdim, `i j -> i .`: j reduces."""
    kind = REDUCED[op.name]
    shape = shape_of(op.operands[0])
    dims = _dims_of(op)
    names, factors = passing(shape)
    for dim in dims:
        factors.update((n, replace(factors[n], reduction=kind)) for n in names[dim])
    given, wanted = dtype_of_value(op.operands[0]), dtype_of_value(op.results[0])
    linear = kind == "sum" and torch.promote_types(given, wanted) == wanted
    return named_rule(factors, [names], [_after(op, names, dims)], linear=[0] if linear else [])


@rule(*(f"aten.{name}" for name in WHOLE))
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
