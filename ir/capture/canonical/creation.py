"""Tensors that a program makes itself: constants, ranges, random numbers; and refused calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardweave.ir.capture.canonical.base import DRAWS, Call, CanonicalError, Result, form
from shardweave.ir.capture.draws import RECIPES, Draw, is_in_place
from shardweave.ir.library.pure_ops import UNWRITTEN

_KINDS: tuple[tuple[Callable[[torch.dtype], bool], Callable[[Any], Any]], ...] = (
    (lambda dtype: dtype == torch.bool, bool),
    (lambda dtype: dtype.is_complex, complex),
    (lambda dtype: dtype.is_floating_point, float),
    (lambda dtype: True, int),
)
"""Tests of a dtype, each with the Python type of its elements; the first match counts."""


def _filled(call: Call, constant: Any) -> Result:
    """Make `aten.full` of a constant. Raises ValueError if the constant is beyond the dtype."""
    if call.dtype.is_floating_point and math.isfinite(constant):
        if abs(constant) > torch.finfo(call.dtype).max:
            raise ValueError(
                f"the constant {constant} does not fit in {call.dtype}, and eager PyTorch "
                "refuses it too; give the tensor a dtype that can hold it, such as dtype=x.dtype."
            )
    kind = next(kind for is_kind, kind in _KINDS if is_kind(call.dtype))
    return call.builder.full(call.shape, kind(constant), call.dtype)


@form("aten._efficientzerotensor", "aten.zeros", "aten.zeros_like", "aten.new_zeros")
@form(*(f"aten.{name}" for name in UNWRITTEN))
def _zeros(call: Call) -> Result:
    """Make zeros; uninitialized tensors become zeros too (see `unwritten`)."""
    return _filled(call, 0)


@form("aten.ones", "aten.ones_like", "aten.new_ones")
def _ones(call: Call) -> Result:
    return _filled(call, 1)


@form("aten.full", "aten.full_like", "aten.new_full")
def _full(call: Call) -> Result:
    return _filled(call, call["fill_value"])


@form("aten.scalar_tensor")
def _scalar_tensor(call: Call) -> Result:
    return _filled(call, call["s"])


@form("aten.fill.Scalar")
def _fill_scalar(call: Call) -> Result:
    return call.builder.full(call.shape, call["value"], call.dtype)


@form("aten.fill.Tensor")
def _fill_tensor(call: Call) -> Result:
    return call.builder.expand(call.builder.cast(call["value"], call.dtype), call.shape)


@form("aten.arange", "aten.arange.start", "aten.arange.start_step")
def _arange(call: Call) -> Result:
    """Make start, start + step, ..; the traced result gives the length."""
    start = call.arguments.get("start") or 0
    step = call.arguments.get("step") or 1
    if not call.dtype.is_floating_point and float(start).is_integer() and float(step).is_integer():
        start, step = int(start), int(step)
    values = {"start": start, "step": step}
    return call.add("aten.arange.start_step", [], values)


@form("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique_dim")
def _data_dependent(call: Call) -> Result:
    raise CanonicalError(
        f"{call.name} gives a result whose shape or value depends on the data, which a program "
        "cannot have; compute with a mask of fixed shape instead, as torch.where does."
    )


NO_RECIPE = (
    "draws random numbers in a way that has no form in a program; draw by torch.rand, randn, "
    "bernoulli, randint, randperm or nn.Dropout, or outside the model and pass them as an input"
)


@form(*(name for name in RECIPES if not is_in_place(name)))
def _random(call: Call) -> Result:
    if call.arguments.get("generator") is not None:
        raise CanonicalError(
            f"{call.name} draws from a generator= of its own, whose state a program cannot hold; "
            "remove generator=, and pass seed= to sw.compile."
        )
    return RECIPES[call.name](Draw(call.builder, call.arguments, call.shape, call.dtype))


@form(DRAWS, "aten.rrelu_with_noise")
def _refused(call: Call) -> Result:
    raise CanonicalError(f"{call.name} {NO_RECIPE}.")
