"""Blocks of Llama's kind: grouped keys, a gated MLP, RMS norms, rotary positions, no biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.runs.linear import linear
from shardweave.benchmarks.runs.spec import DecoderSpec


class _Rotated(torch.autograd.Function):
    """Rotary positions as one kernel each way that reads a value and the angles, and keeps the
    angles alone. Any numbers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return x * angles

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (angles,) = ctx.saved_tensors
        return grads[0] * angles, None


class _Gated(torch.autograd.Function):
    """silu(gate) * up as one kernel each way, of both side by side: it reads two values and writes
    one, and backward reads three and writes two. Any numbers do."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return both.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        return both * grads[0][..., None]


class PlainNorm(nn.Module):
    """An RMS norm of PyTorch's ops, one by one, in 32 bits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: any, the last dim normalised -> the same."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


def rms_norm(spec: DecoderSpec, size: int = 0) -> nn.Module:
    """As one kernel each way, or of PyTorch's ops; of the hidden features, or so many. A layer norm
    without a bias stands for the kernel, which reads, writes and keeps as much."""
    size = size or spec.hidden
    return nn.LayerNorm(size, bias=False) if spec.fuses_norms else PlainNorm(size)


def rotated(spec: DecoderSpec, x: Tensor, angles: Tensor) -> Tensor:
    """With rotary positions: as one kernel, or as torchtitan's ops: cast to 32 bits, a product of
    complex numbers, and cast back."""
    if spec.fuses_norms:
        return _Rotated.apply(x, angles)
    return (x.float() * angles.float()).to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal attention in one kernel, or with stored scores; several queries share keys."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec, size, keys = spec, spec.head_size, spec.num_key_heads
        self.group, biased = spec.heads // keys, spec.architecture.has_qkv_biases
        if spec.joins:
            self.qkv = linear(spec, spec.hidden, keys * (self.group + 2) * size, bias=biased)
        else:
            self.q = linear(spec, spec.hidden, spec.heads * size, bias=biased)
            self.k = linear(spec, spec.hidden, keys * size, bias=biased)
            self.v = linear(spec, spec.hidden, keys * size, bias=biased)
        self.proj = linear(spec, spec.heads * size, spec.hidden)
        if spec.architecture.norms_heads:
            self.q_norm, self.k_norm = rms_norm(spec, size), rms_norm(spec, size)
        self.register_buffer("angles", torch.empty(spec.seq, 1, 1, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: batch x seq x hidden -> the same."""
        q, k, v = self._parts(x)
        if self.spec.architecture.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = self.get_buffer("angles")
        q, k = rotated(self.spec, q, angles), rotated(self.spec, k, angles)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        if self.spec.is_fused:
            grouped = self.group > 1
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
            found = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.proj(found.transpose(1, 2).flatten(2))

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Shapes: batch x seq x heads of keys x heads of each x head size."""
        size, keys = self.spec.head_size, self.spec.num_key_heads
        if not self.spec.joins:
            return tuple(one(x).unflatten(2, (keys, -1, size)) for one in (self.q, self.k, self.v))
        # By group of queries, as Megatron-LM has them: each device has whole groups.
        joint = self.qkv(x).unflatten(2, (keys, self.group + 2, size))
        return joint.split([self.group, 1, 1], 3)


class GatedMLP(nn.Module):
    """Two linear maps, or both as one, whose product a third takes."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.joins:
            self.both = linear(spec, spec.hidden, 2 * spec.ffn)
        else:
            self.gate = linear(spec, spec.hidden, spec.ffn)
            self.up = linear(spec, spec.hidden, spec.ffn)
        self.down = linear(spec, spec.ffn, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.joins:
            both = self.both(x).unflatten(2, (-1, 2))
            if self.spec.fuses_gate:
                return self.down(_Gated.apply(both))
            gate, up = both.unbind(3)
        else:
            gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = rms_norm(spec), rms_norm(spec)
        self.attn, self.mlp = GroupedAttention(spec), GatedMLP(spec)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: batch x seq x hidden -> the same."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))
