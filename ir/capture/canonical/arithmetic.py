"""Arithmetic, reductions, and activations of two halves or branches, written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.canonical.base import Call, Form, Result, form, normalized
from shardweave.ir.dialects.types import dtype_of_value, shape_of, tensor_type
from shardweave.ir.ops.registry import spec_named


def form_with_numbers(*names: str) -> Callable[[Form], Form]:
    """Make a decorator that registers a function for `aten.NAME.Tensor` and `aten.NAME.Scalar`."""
    return form(*(f"aten.{name}.{other}" for name in names for other in ("Tensor", "Scalar")))


@form_with_numbers("add", "sub", "mul", "div", "remainder", "fmod")
@form_with_numbers("eq", "ne", "lt", "le", "gt", "ge")
@form_with_numbers("bitwise_and", "bitwise_or", "bitwise_xor")
def binary(call: Call) -> Result:
    """Import a binary op: for a Python number its `.Scalar` overload; x + 0 and x * 1 become x."""
    base = call.name.rsplit(".", 1)[0]
    source: SSAValue | float | complex = call["self"]
    other: SSAValue | float | complex = call["other"]
    if not isinstance(source, SSAValue):  # as a number counts beside a tensor
        assert isinstance(other, SSAValue)
        numbers = torch.empty((), device="meta", dtype=dtype_of_value(other))
        source = call.builder.full((), source, torch.result_type(numbers, source))
    values = {"alpha": call["alpha"]} if "alpha" in call.arguments else {}
    if isinstance(other, complex):
        other = call.builder.full((), other, call.dtype)
    if isinstance(other, SSAValue):
        return call.add(f"{base}.Tensor", [source, other], values)
    same = source.type == tensor_type(call.shape, call.dtype)
    if same and spec_named(f"{base}.Tensor").neutral == other:
        return source
    values["other"] = other
    return call.add(f"{base}.Scalar", [source], values)


def _reduced(call: Call) -> tuple[list[int], int]:
    shape = shape_of(call["self"])
    given = call.arguments.get("dim") or range(len(shape))
    dims = sorted(normalized(d, len(shape)) for d in given) if shape else []
    return dims, math.prod(shape[d] for d in dims)


@form("aten.mean", "aten.mean.dim")
def _mean(call: Call) -> Result:
    """Divide the sum over the reduced dims by their global size."""
    b = call.builder
    source = b.cast(call["self"], call.dtype)
    dims, count = _reduced(call)
    total = b.sum(source, dims, call.arguments.get("keepdim", False))
    return b.call("aten.div.Scalar", total, other=count)


@form("aten.sum", "aten.sum.dim_IntList")
def _sum_(call: Call) -> Result:
    source = call["self"]
    values = {"dim": _reduced(call)[0], "keepdim": call.arguments.get("keepdim", False)}
    if call.arguments.get("dtype") not in (None, dtype_of_value(source)):
        values["dtype"] = call["dtype"]
    return call.add("aten.sum.dim_IntList", [source], values)


def _is_of_all(call: Call) -> bool:
    shape = shape_of(call["self"])
    return bool(shape) and len(_reduced(call)[0]) == len(shape)


@form("aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.linalg_vector_norm")
def _norm(call: Call) -> Result:
    """Use `linalg_vector_norm`; a 2-norm of all elements is the root of a sum of squares."""
    power = call.arguments.get("p", call.arguments.get("ord"))
    power = 2 if power is None else power
    source, b = call["self"], call.builder
    if power == 2 and _is_of_all(call) and not dtype_of_value(source).is_complex:
        # Kernels add up squares of few digits in float32.
        source = b.cast(source, torch.promote_types(call.dtype, torch.float32))
        total = _reduce(call, "aten.sum.dim_IntList", b.call("aten.mul.Tensor", source, source))
        return b.cast(b.call("aten.sqrt", total), call.dtype)
    values = {"dim": call.arguments.get("dim") or None, "ord": power}
    values["keepdim"] = call.arguments.get("keepdim", False)
    if call.arguments.get("dtype") is not None:
        values["dtype"] = call["dtype"]
    return call.add("aten.linalg_vector_norm", [source], values)


def _reduce(call: Call, name: str, source: SSAValue) -> SSAValue:
    keepdim = call.arguments.get("keepdim", False)
    return call.builder.call(name, source, dim=_reduced(call)[0], keepdim=keepdim)


@form("aten.min", "aten.amin")
def _least(call: Call) -> SSAValue:
    """Compute a minimum of all elements as a negated maximum, which shards can combine."""
    if not _is_of_all(call):
        return (
            call.add("aten.min", [call["self"]])
            if call.name == "aten.min"
            else _reduce(call, "aten.amin", call["self"])
        )
    negative = "aten.neg" if call.dtype.is_floating_point else "aten.bitwise_not"
    negatives = call.builder.call(negative, call["self"])
    return call.builder.call(negative, _reduce(call, "aten.amax", negatives))


@form("aten.var.correction", "aten.var_mean.correction")
def _variance(call: Call) -> Result:
    """Compute the mean squared distance from the global mean, by explicit sums."""
    b, source = call.builder, call["self"]
    dims, count = _reduced(call)
    correction = call.arguments.get("correction")
    center = b.call("aten.div.Scalar", b.sum(source, dims, True), other=count)
    distance = b.call("aten.sub.Tensor", source, center)
    square = b.call("aten.mul.Tensor", distance, distance)
    total = b.sum(square, dims, call.arguments.get("keepdim", False))
    freedom = count - (1 if correction is None else correction)
    result = b.call("aten.div.Scalar", total, other=freedom)
    if call.name == "aten.var.correction":
        return result
    return [result, b.view(center, shape_of(result))]
