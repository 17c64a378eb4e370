# pyright: basic
"""The ops that torch decomposes in capture, and interpolation, which is kept.

Batch norm becomes sums over the global batch, and losses become elementwise ops. Interpolation
would become indexing, for which sharded images would be gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardweave.ir.torch_private import get_decompositions

_ATEN = torch.ops.aten
_DECOMPOSED = (
    _ATEN._native_batch_norm_legit, _ATEN._native_batch_norm_legit_functional,
    _ATEN._native_batch_norm_legit_no_training, _ATEN._batch_norm_with_update_functional,
    _ATEN.native_batch_norm, _ATEN.native_batch_norm_backward, _ATEN.batch_norm_backward,
    _ATEN.binary_cross_entropy, _ATEN.binary_cross_entropy_backward,
    _ATEN.binary_cross_entropy_with_logits, _ATEN.soft_margin_loss,
    _ATEN.soft_margin_loss_backward, _ATEN.mse_loss, _ATEN.mse_loss_backward,
    _ATEN.huber_loss, _ATEN.huber_loss_backward, _ATEN.smooth_l1_loss,
    _ATEN.smooth_l1_loss_backward, _ATEN.log_sigmoid_forward, _ATEN.log_sigmoid_backward,
    _ATEN.glu, _ATEN.glu_backward, _ATEN.aminmax, _ATEN.nansum, _ATEN.pixel_shuffle,
    _ATEN.pixel_unshuffle, _ATEN.channel_shuffle,
)  # fmt: skip


_KEPT = (
    _ATEN.upsample_nearest1d, _ATEN.upsample_nearest2d, _ATEN.upsample_nearest3d,
    _ATEN._upsample_nearest_exact1d, _ATEN._upsample_nearest_exact2d,
    _ATEN._upsample_nearest_exact3d, _ATEN.upsample_linear1d, _ATEN.upsample_bilinear2d,
    _ATEN.upsample_trilinear3d, _ATEN.upsample_bicubic2d,
)  # fmt: skip


@contextlib.contextmanager
def interpolation_kept() -> Iterator[None]:
    """Trace interpolation as the ops that eager PyTorch runs, in the context."""
    with contextlib.ExitStack() as stack:
        for op in [getattr(packet, name) for packet in _KEPT for name in ("default", "vec")]:
            # Without autograd kernels in Python, torch traces its kernels in C++.
            kept = {key: kernel for key, kernel in op.py_kernels.items() if key.name == "Meta"}
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels, kept, clear=True))
            op._dispatch_cache.clear()
        yield


@cache
def decompositions() -> Mapping[Any, Any]:
    """Return torch's decompositions of the ops in `_DECOMPOSED`, by overload."""
    table = get_decompositions(_DECOMPOSED)
    return {op: _widely(make) if _keeps_statistics(op) else make for op, make in table.items()}


def _keeps_statistics(op: Any) -> bool:
    return "batch_norm" in op.name() and "backward" not in op.name()


def _widely(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decomposition: keep half-precision batches' statistics in float32, as eager does."""

    @wraps(make)
    def made(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype not in (torch.bfloat16, torch.float16):
            return make(input, *args, **kwargs)
        output, *statistics = make(input.float(), *args, **kwargs)
        return output.to(input.dtype), *statistics

    return made
