# pyright: basic
# torch's own modules are only partly typed.
"""Fake quantization of torch.ao.quantization, whose modules branch on values of their buffers.

`FakeQuantize` reads in Python whether it observes and whether it rounds; its observers read whether
they have seen a batch. Here both branches are computed and `where` selects, so that
`enable_observer` and `disable_fake_quant` take effect at the next call of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.ao.quantization import fake_quantize, observer

_OBSERVERS = (
    observer.MinMaxObserver,
    observer.MovingAverageMinMaxObserver,
    observer.PerChannelMinMaxObserver,
    observer.MovingAveragePerChannelMinMaxObserver,
)


@contextlib.contextmanager
def quantized_written_out() -> Iterator[None]:
    """Replace torch's fake quantization `forward`s by the functions here, while in the context."""
    fused = fake_quantize.FusedMovingAvgObsFakeQuantize
    with contextlib.ExitStack() as stack:
        for kind, forward in (
            (fake_quantize.FakeQuantize, quantize),
            (fused, quantize_fused),
            *((kind, observe) for kind in _OBSERVERS),
        ):
            stack.enter_context(mock.patch.object(kind, "forward", forward))
        yield


def quantize(self: Any, X: Tensor) -> Tensor:
    """Compute `FakeQuantize.forward`. ValueError for an observer that a program cannot hold."""
    watching = self.activation_post_process
    is_observing = self.observer_enabled[0] == 1
    if isinstance(watching, _OBSERVERS):
        observe(watching, X, is_observing)
        scale, zero_point = parameters_of(watching)
    elif isinstance(watching, observer.FixedQParamsObserver):
        scale, zero_point = watching.scale, watching.zero_point
    else:
        raise ValueError(
            f"a program cannot hold a FakeQuantize with a {type(watching).__name__}; give it "
            "observer=MovingAverageMinMaxObserver"
        )
    for held, new in ((self.scale, scale), (self.zero_point, zero_point)):
        _check_size(held, new)
        held.copy_(torch.where(is_observing, new, held))
    bounds = watching.quant_min, watching.quant_max
    if self.is_per_channel:
        rounded = torch.fake_quantize_per_channel_affine(
            X, self.scale, self.zero_point, self.ch_axis, *bounds
        )
    else:
        rounded = torch.fake_quantize_per_tensor_affine(X, self.scale, self.zero_point, *bounds)
    return torch.where(self.fake_quant_enabled[0] == 1, rounded, X)


def quantize_fused(self: Any, X: Tensor) -> Tensor:
    """Compute `FusedMovingAvgObsFakeQuantize.forward`; buffers must have their final sizes."""
    watching = self.activation_post_process
    held = watching.min_val, watching.max_val, self.scale, self.zero_point
    for buffer in held if self.is_per_channel else ():
        _check_size(buffer, X.new_empty(X.shape[self.ch_axis]))
    return torch.fused_moving_avg_obs_fake_quant(
        X,
        self.observer_enabled,
        self.fake_quant_enabled,
        *held,
        watching.averaging_constant,
        watching.quant_min,
        watching.quant_max,
        self.ch_axis,
        self.is_per_channel,
        self.is_symmetric_quant,
    )


def observe(self: Any, x_orig: Tensor, is_observing: Tensor | None = None) -> Tensor:
    """Compute `forward` of an observer of minima and maxima, per tensor or per channel."""
    x = x_orig.detach().to(self.min_val.dtype)
    if isinstance(self, observer.PerChannelMinMaxObserver):
        lowest, highest = torch.aminmax(x.transpose(0, self.ch_axis).flatten(1), dim=1)
    else:
        lowest, highest = torch.aminmax(x)
    is_first = torch.isinf(self.min_val) & torch.isinf(self.max_val)
    factor = getattr(self, "averaging_constant", None)
    for held, new, extreme in (
        (self.min_val, lowest, torch.minimum),
        (self.max_val, highest, torch.maximum),
    ):
        _check_size(held, new)
        later = extreme(held, new) if factor is None else held + factor * (new - held)
        new = torch.where(is_first, new, later)
        held.copy_(new if is_observing is None else torch.where(is_observing, new, held))
    return x_orig


def parameters_of(self: Any) -> tuple[Tensor, Tensor]:
    """Return scales and zero points as the observer's `calculate_qparams` computes them."""
    low, high, steps = self.min_val, self.max_val, float(self.quant_max - self.quant_min)
    lowest, highest = low.clamp(max=0), high.clamp(min=0)
    zero = torch.zeros_like(lowest)
    if self.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric):
        scale = torch.maximum(torch.maximum(-lowest, highest) / (steps / 2), self.eps)
        if self.dtype in (torch.quint8, torch.uint8):
            middle = (self.quant_min + self.quant_max) // 2
            zero = zero + (middle if self.has_customized_qrange else 128)
        elif self.dtype == torch.uint16:
            zero = zero + 2**15
    elif self.qscheme == torch.per_channel_affine_float_qparams:
        scale = (high - low) / steps
        scale = torch.where(scale > self.eps, scale, torch.ones_like(scale))
        zero = -1 * low / scale
    else:
        scale = torch.maximum((highest - lowest) / steps, self.eps)
        zero = self.quant_min - torch.round(lowest / scale)
        zero = zero.clamp(self.quant_min, self.quant_max)
    has_range = ~torch.isinf(low)
    scale, zero = torch.where(has_range, scale, 1.0), torch.where(has_range, zero, 0.0)
    return scale.reshape(-1), zero.reshape(-1)


def _check_size(held: Tensor, new: Tensor) -> None:
    if held.numel() != new.numel():
        raise ValueError(
            "quantization per channel sizes its buffers in its first call; run the model once, "
            "and compile it then"
        )
