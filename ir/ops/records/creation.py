"""Ops that make a tensor from numbers alone: constants, ranges, random numbers."""

from __future__ import annotations

from typing import Any

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.library.philox import RANDOM
from shardweave.ir.ops.spec import OpSpec, family, result_dtype, result_shape


def _end_of_range(op: AtenOp) -> Any:
    start, step, length = op.value("start"), op.value("step"), shape_of(op.results[0])[0]
    if isinstance(start, int) and isinstance(step, int):
        return start + step * length
    # Half a step short: a fraction rounded up would give one number more.
    return start + step * (length - 0.5)


def _counts_up(op: AtenOp) -> bool:
    """True if a range is of integers and ascending."""
    given = (op.value("start"), op.value("step"))
    is_integer = not dtype_of_value(op.results[0]).is_floating_point
    return is_integer and all(isinstance(value, int) for value in given) and given[1] > 0


SPECS = (
    OpSpec(
        "aten.full",
        rule="full",
        zero="constant",
        role="pointwise",
        derived={"size": result_shape, "dtype": result_dtype},
    ),
    OpSpec(
        "aten.arange.start_step",
        rule="arange",
        role="pointwise",
        fits=_counts_up,
        derived={"end": _end_of_range, "dtype": result_dtype},
    ),
    *family(
        "zero bernoulli.p bernoulli.Tensor uniform normal_functional exponential", overwrites=True
    ),
    OpSpec(RANDOM, rule="random", derived={"dtype": result_dtype}),
)
