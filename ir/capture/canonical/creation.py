"""Tensors that a program makes itself: constants and ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardweave.ir.capture.canonical.base import Call, Result, form
from shardweave.ir.library.pure_ops import UNWRITTEN

_FILL: dict[str, float | None] = {
    "_efficientzerotensor": 0,
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    **dict.fromkeys(UNWRITTEN, 0),
    "full": None, "full_like": None, "new_full": None, "scalar_tensor": None,
}  # fmt: skip

_KINDS: tuple[tuple[Callable[[torch.dtype], bool], Callable[[Any], Any]], ...] = (
    (lambda dtype: dtype == torch.bool, bool),
    (lambda dtype: dtype.is_complex, complex),
    (lambda dtype: dtype.is_floating_point, float),
    (lambda dtype: True, int),
)
"""Of a dtype the Python type of its elements."""


@form(*(f"aten.{name}" for name in _FILL))
def fill(call: Call) -> Result:
    """One op for all tensors of a single value; those of no value are zero (see `unwritten`)."""
    constant = _FILL[call.name.removeprefix("aten.")]
    if constant is None:
        constant = call["s"] if call.name == "aten.scalar_tensor" else call["fill_value"]
    kind = next(kind for is_kind, kind in _KINDS if is_kind(call.dtype))
    return call.builder.full(call.shape, kind(constant), call.dtype)


@form("aten.fill.Scalar")
def fill_scalar(call: Call) -> Result:
    return call.builder.full(call.shape, call["value"], call.dtype)


@form("aten.fill.Tensor")
def fill_tensor(call: Call) -> Result:
    """A scalar tensor broadcast to the shape."""
    return call.builder.expand(call.builder.cast(call["value"], call.dtype), call.shape)


@form("aten.arange", "aten.arange.start", "aten.arange.start_step")
def arange(call: Call) -> Result:
    """start, start + step, ..; the length is the result's."""
    start = call.arguments.get("start") or 0
    step = call.arguments.get("step") or 1
    if not call.dtype.is_floating_point and float(start).is_integer() and float(step).is_integer():
        start, step = int(start), int(step)
    values = {"start": start, "step": step}
    return call.add("aten.arange.start_step", [], values)
