"""Ops along dims: sums and extremes, softmaxes, scans, sorts and statistics."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, cast

from xdsl.ir import Attribute

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_python
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.ops.spec import OpSpec, Reduction, family

ONE_PROGRAM = 65536
"""Most elements that one program reduces to one number: it reads a quarter of a MiB in about the
time of a launch, 3 us. Longer reductions are left to the library, which starts many programs."""


def reductions_over_dims(op: AtenOp) -> tuple[Reduction, ...]:
    """The reduction over the dims in an op's `dim`; empty unless they are all the first dims, or
    all the last dims, of the operand."""
    return _of_dims(shape_of(op.operands[0]), op.properties.get("dim"))


@cache
def _of_dims(shape: tuple[int, ...], dim: Attribute | None) -> tuple[Reduction, ...]:
    given = cast("list[int]", to_python(dim)) if dim is not None else []
    dims = sorted(d % len(shape) for d in given) if shape else []
    kept = [d for d in range(len(shape)) if d not in dims and shape[d] != 1]
    reduced = [d for d in dims if shape[d] != 1]
    numel = math.prod(shape)
    size = math.prod(shape[d] for d in reduced)
    if not reduced:
        return ()
    if not kept:
        return (Reduction("row", numel, numel),) if numel <= ONE_PROGRAM else ()
    if min(reduced) > max(kept):
        return (Reduction("row", numel, size),)
    if max(reduced) < min(kept):
        return (Reduction("column", numel, numel // size),)
    return ()


def _reduces(op: AtenOp) -> bool:
    return bool(reductions_over_dims(op))


def _over_last_dim(op: AtenOp) -> tuple[Reduction, ...]:
    shape = shape_of(op.operands[0])
    return (Reduction("row", math.prod(shape), shape[-1]),)


def _is_last_dim(op: AtenOp) -> bool:
    rank = len(shape_of(op.results[0]))
    return op.value("dim") % rank == rank - 1


_OVER_DIMS: dict[str, Any] = {
    "role": "reduce",
    "reductions": reductions_over_dims,
    "fits": _reduces,
}
_SOFTMAX: dict[str, Any] = {
    "rule": "along_whole_dims",
    "role": "reduce",
    "reductions": _over_last_dim,
    "fits": _is_last_dim,
}

SPECS = (
    OpSpec("aten.sum", rule="reduction", combine="sum", zero="all"),
    OpSpec(
        "aten.sum.dim_IntList",
        rule="reduction",
        combine="sum",
        zero="all",
        works_in_parts=True,
        counts=True,
        is_direct=True,
        **_OVER_DIMS,
    ),
    OpSpec("aten.max", rule="reduction", combine="max"),
    OpSpec("aten.amax", rule="reduction", combine="max", is_direct=True, **_OVER_DIMS),
    OpSpec("aten.amin", rule="along_whole_dims", combine="min", **_OVER_DIMS),
    OpSpec("aten._softmax", is_direct=True, **_SOFTMAX),
    *family("_safe_softmax _softmax_backward_data", **_SOFTMAX),
    *family("_log_softmax logsumexp", rule="along_whole_dims", is_direct=True),
    OpSpec("aten.histc", rule="histogram"),
    OpSpec("aten.renorm", rule="norms_of_slices"),
    OpSpec("aten.cumsum", rule="along_whole_dims", counts=True),
    *family(
        """
        _log_softmax_backward_data cumprod logcumsumexp cummax cummin
        all all.dim all.dims any any.dim any.dims min max.dim min.dim prod prod.dim_int
        argmax argmin argsort kthvalue median.dim nanmedian.dim mode sort sort.stable topk
        mean mean.dim var.correction var_mean.correction std.correction std_mean.correction
        linalg_vector_norm _fft_c2c _fft_c2r _fft_r2c
        """,
        rule="along_whole_dims",
    ),
)
