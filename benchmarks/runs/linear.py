"""Linear maps of a measured run: as PyTorch has them, or with casts to 8 bits around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.runs.spec import DecoderSpec


class _CastProduct(torch.autograd.Function):
    """x w^T in 8 bits: x is kept in 8, and what comes back is cast, as they are and turned: as many
    bytes as a copy moves. That 8 bits are read again as 16 stands for writing x turned. Any numbers
    do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.uint8), weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0] * 0.5
        rows, columns = grad.flatten(0, 1), x.to(grad.dtype).flatten(0, 1)
        return grad @ weight, rows.t() @ columns


class CastLinear(nn.Linear):
    """Its products in 8 bits. That weights are cast, once a step, is left out."""

    def forward(self, input: Tensor) -> Tensor:
        """Shapes: as of `nn.Linear`, of three dims."""
        y: Tensor = _CastProduct.apply(input, self.weight)
        return y if self.bias is None else y + self.bias


def linear(spec: DecoderSpec, inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    """A linear map of a block."""
    return (CastLinear if spec.casts else nn.Linear)(inputs, outputs, bias=bias)
