"""Batch norm over the global batch, written as sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, cast

import torch
from xdsl.ir import SSAValue

from shardweave.ir.capture.builder import ImportBuilder
from shardweave.ir.capture.canonical.base import Call, form
from shardweave.ir.dialects.types import dtype_of_type, dtype_of_value, shape_of, shape_of_type


@dataclass
class _Channels:
    """Helpers for values with a channel dim 1: what is summed, and how channels broadcast."""

    call: Call
    shape: tuple[int, ...]

    @property
    def dims(self) -> list[int]:
        return [d for d in range(len(self.shape)) if d != 1]

    @property
    def count(self) -> int:
        return math.prod(self.shape[d] for d in self.dims)

    def total(self, value: SSAValue) -> SSAValue:
        return self.call.builder.sum(value, self.dims)

    def mean(self, value: SSAValue) -> SSAValue:
        return self.call.builder.call("aten.div.Scalar", self.total(value), other=self.count)

    def wide(self, channels: SSAValue) -> SSAValue:
        """Per-channel values shaped to broadcast against the input."""
        ones = (1,) * (len(self.shape) - 2)
        return self.call.builder.view(channels, (1, self.shape[1], *ones))


_FEW_DIGITS = (torch.bfloat16, torch.float16)


def _widely(
    compute: Callable[[Call], list[SSAValue | None]],
) -> Callable[[Call], list[SSAValue | None]]:
    """Compute in float32 what is given in fewer digits, as torch does; results as it types them."""

    @wraps(compute)
    def computed(call: Call) -> list[SSAValue | None]:
        if not any(map(_has_few_digits, call.arguments.values())):
            return compute(call)
        build = call.builder
        wide = {name: _wide(build, value) for name, value in call.arguments.items()}
        results = compute(replace(call, arguments=wide))
        # Traces say that saved statistics have few digits as well; eager keeps them in float32.
        saved = () if call.name.endswith("backward") else (1, 2)
        return [
            value if value is None or index in saved else build.cast(value, _dtype(call, index))
            for index, value in enumerate(results)
        ]

    return computed


def _dtype(call: Call, index: int) -> torch.dtype:
    type_ = call.types[index]
    assert type_ is not None
    return dtype_of_type(type_)


def _has_few_digits(value: Any) -> bool:
    if not isinstance(value, SSAValue):
        return False
    return dtype_of_value(cast("SSAValue", value)) in _FEW_DIGITS


def _wide(build: ImportBuilder, value: Any) -> Any:
    return build.cast(value, torch.float32) if _has_few_digits(value) else value


@form("aten._batch_norm_with_update_functional")
def _batch_norm_with_update(call: Call) -> list[SSAValue | None]:
    """As `_batch_norm`, with what a kernel keeps for its backward pass: nothing here."""
    *types, reserve, mean_type, variance_type = call.types
    computed = _batch_norm(replace(call, types=[*types, mean_type, variance_type]))
    assert isinstance(computed, list)
    output, mean, rstd, *running = computed
    kept = reserve and call.builder.full(shape_of_type(reserve), 0, dtype_of_type(reserve))
    return [output, mean, rstd, kept, *running]


@form("aten._native_batch_norm_legit_functional")
@_widely
def _batch_norm(call: Call) -> list[SSAValue | None]:
    """Output, batch mean, 1 / standard deviation, and the new running mean and variance."""
    b = call.builder
    source = call["input"]
    channels = _Channels(call, shape_of(source))
    running_mean, running_var = call["running_mean"], call["running_var"]
    if not call.arguments.get("training", True):
        output = _normalize(call, channels, running_mean, _rstd(call, running_var))
        return [output, *_nothing_saved(call), running_mean, running_var]
    mean, variance = _statistics(call, channels)
    rstd = _rstd(call, variance)
    output = _normalize(call, channels, mean, rstd)
    momentum = call["momentum"]
    unbiased = b.call(
        "aten.mul.Scalar", variance, other=channels.count / max(channels.count - 1, 1)
    )
    return [
        output,
        mean,
        rstd,
        _updated(call, running_mean, mean, momentum),
        _updated(call, running_var, unbiased, momentum),
    ]


@form("aten._native_batch_norm_legit.no_stats")
@_widely
def _batch_norm_without_buffers(call: Call) -> list[SSAValue | None]:
    """Output, batch mean and 1 / standard deviation; instance norms are made of it."""
    channels = _Channels(call, shape_of(call["input"]))
    mean, variance = _statistics(call, channels)
    rstd = _rstd(call, variance)
    return [_normalize(call, channels, mean, rstd), mean, rstd]


@form("aten._native_batch_norm_legit_no_training", "aten.native_batch_norm")
@_widely
def _batch_norm_inference(call: Call) -> list[SSAValue | None]:
    """The affine map of the running statistics."""
    channels = _Channels(call, shape_of(call["input"]))
    assert not call.arguments.get("training", False)
    mean, rstd = call["running_mean"], _rstd(call, call["running_var"])
    return [_normalize(call, channels, mean, rstd), *_nothing_saved(call)]


def _nothing_saved(call: Call) -> list[SSAValue]:
    """Statistics without elements, as eager saves them in evaluation, whatever traces say."""
    return [call.builder.full((0,), 0, dtype_of_value(call["running_mean"])) for _ in range(2)]


def _statistics(call: Call, channels: _Channels) -> tuple[SSAValue, SSAValue]:
    b = call.builder
    mean = channels.mean(call["input"])
    centered = b.call("aten.sub.Tensor", call["input"], channels.wide(mean))
    return mean, channels.mean(b.call("aten.mul.Tensor", centered, centered))


def _rstd(call: Call, variance: SSAValue) -> SSAValue:
    b = call.builder
    return b.call("aten.rsqrt", b.call("aten.add.Scalar", variance, other=call["eps"]))


def _updated(call: Call, running: SSAValue, new: SSAValue, momentum: float) -> SSAValue:
    b = call.builder
    kept = b.call("aten.mul.Scalar", running, other=1 - momentum)
    return b.call("aten.add.Tensor", kept, b.call("aten.mul.Scalar", new, other=momentum))


def _normalize(call: Call, channels: _Channels, mean: SSAValue, rstd: SSAValue) -> SSAValue:
    b = call.builder
    centered = b.call("aten.sub.Tensor", call["input"], channels.wide(mean))
    output = b.call("aten.mul.Tensor", centered, channels.wide(rstd))
    if call["weight"] is not None:
        output = b.call("aten.mul.Tensor", output, channels.wide(call["weight"]))
    if call["bias"] is not None:
        output = b.call("aten.add.Tensor", output, channels.wide(call["bias"]))
    return output


@form("aten.native_batch_norm_backward", "aten.batch_norm_backward")
@_widely
def _batch_norm_backward(call: Call) -> list[SSAValue | None]:
    """Gradients of input, weight and bias.

    With x^ = (x - mean) rstd and g the output's gradient: dbias = sum g, dweight = sum g x^,
    dx = weight rstd (g - dbias / N - x^ dweight / N), N the global count per channel.
    """
    b = call.builder
    grad, source = call["grad_out"], call["input"]
    channels = _Channels(call, shape_of(source))
    is_newer = call.name == "aten.batch_norm_backward"
    training, saved = ("update", "save_var") if is_newer else ("train", "save_invstd")
    training = call[training]
    mean = call["save_mean"] if training else call["running_mean"]
    rstd = call[saved] if training else _rstd(call, call["running_var"])
    centered = b.call("aten.sub.Tensor", source, channels.wide(mean))
    normal = b.call("aten.mul.Tensor", centered, channels.wide(rstd))
    bias_grad = channels.total(grad)
    weight_grad = channels.total(b.call("aten.mul.Tensor", grad, normal))
    inner = grad
    if training:
        shift = b.call("aten.div.Scalar", bias_grad, other=channels.count)
        tilt = b.call("aten.div.Scalar", weight_grad, other=channels.count)
        inner = b.call("aten.sub.Tensor", grad, channels.wide(shift))
        slope = b.call("aten.mul.Tensor", normal, channels.wide(tilt))
        inner = b.call("aten.sub.Tensor", inner, slope)
    scale = rstd if call["weight"] is None else b.call("aten.mul.Tensor", rstd, call["weight"])
    input_grad = b.call("aten.mul.Tensor", inner, channels.wide(scale))
    wanted = call["output_mask"]
    grads = (input_grad, weight_grad, bias_grad)
    return [g if w else None for g, w in zip(grads, wanted, strict=True)]
