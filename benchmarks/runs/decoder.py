"""The model of a measured run: a decoder of a run's sizes, captured once with a few layers.

Blocks of a GPT stand here, those of Llama's kind in `llama_block`. What frameworks of these runs
compute that `gpt:` does not: attention whose scores are stored, where a run does not say that it is
fused, with the dropout of Megatron-LM as one op of the scores' size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.benchmarks.runs.linear import linear
from shardweave.benchmarks.runs.llama_block import LlamaBlock, rms_norm
from shardweave.benchmarks.runs.spec import DecoderSpec
from shardweave.ir.capture.capture import capture
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import FakeTensorMode

LAYERS = 3
"""Captured: the first, one that stands for all others, and the last."""

KEPT = 0.9


class _AddDropped(torch.autograd.Function):
    """x + dropout(y + bias) as frameworks fuse it: one op that reads all three, and backward one
    that drops the gradient of y and one that adds up the bias's. Any numbers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return torch.addcmul(x, y, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        return grad, grad * KEPT, grad.sum((0, 1))


class _CrossEntropy(torch.autograd.Function):
    """Megatron-LM's `vocab_parallel_cross_entropy`, op by op, of which two values of the logits'
    size in 32 bits live at once. Its one write of the gradient at each label, in place, is left
    out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        right = shifted.gather(-1, labels[:, None])
        powers = shifted.exp()
        total = powers.sum(-1, keepdim=True)
        ctx.save_for_backward(powers / total)
        return (total.log() - right).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return probabilities * (grads[0] / len(probabilities)), None


class _FusedCrossEntropy(torch.autograd.Function):
    """FlashAttention's kernels of cross entropy (`csrc/xentropy`), one each way: the first reads
    logits of 16 bits, and the second writes their gradient beside them. Any numbers do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        sums = logits.sum(-1, dtype=torch.float32)
        ctx.save_for_backward(logits, sums)
        return (sums * labels).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, sums = ctx.saved_tensors
        return logits * (sums * grads[0]).to(logits.dtype)[:, None], None


class _TorchCrossEntropy(torch.autograd.Function):
    """PyTorch's: `log_softmax` keeps what it gives, backward `nll_loss` makes a gradient as large,
    and a third follows from both: three of the logits' size in 32 bits. Any numbers do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        found = logits - logits.sum(-1, keepdim=True)
        ctx.save_for_backward(found)
        return found.gather(-1, labels[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (found,) = ctx.saved_tensors
        return found * (found * grads[0]), None


COPIES, COPIES_OF_VIEW = 1, 5
"""Of a gradient, backward through `masked_fill_`, beside masking it. PyTorch's `masked_fill` masks
a copy. For a tensor that is a view of another the gradient is copied into memory laid out as the
other (AsStridedBackward), copied and cloned again around the masking, and copied back (CopySlices:
torch/csrc/autograd/functions/tensor.cpp)."""


class _Masked(torch.autograd.Function):
    """`masked_fill_` with as many ops backward as PyTorch has kernels. Any numbers do."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, later: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(later)
        ctx.copies = copies
        return scores.masked_fill(later, -1e4)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (later,), (grad,) = ctx.saved_tensors, grads
        for _ in range(ctx.copies):
            grad = grad * KEPT
        return grad.masked_fill(later, 0.0), None, None


class AddToResidual(nn.Module):
    """Adds what a block gives to the residual stream, with its bias and dropped if it `drops`."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(spec.hidden)) if spec.drops_hidden else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Shapes: batch x seq x hidden, both."""
        return x + y if self.bias is None else _AddDropped.apply(x, y, self.bias)


class FusedAttention(nn.Module):
    """Causal attention in one kernel. Queries, keys and values are one product, head by head, and
    what `proj` gives has no bias: frameworks add it in the kernel that adds the residual."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.head_size = spec.hidden // spec.heads
        self.qkv = linear(spec, spec.hidden, 3 * spec.hidden, bias=True)
        self.proj = linear(spec, spec.hidden, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: batch x seq x hidden -> the same."""
        sizes = (*x.shape[:2], -1, 3, self.head_size)
        q, k, v = self.qkv(x).view(sizes).transpose(1, 2).unbind(3)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(found.transpose(1, 2).flatten(2))


class StoredAttention(FusedAttention):
    """Attention whose scores, probabilities and dropped probabilities are tensors. As Megatron-LM
    it has sequences first, so that products read heads of all samples without a copy."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: seq x batch x hidden -> the same."""
        seq, batch = x.shape[:2]
        merged = self.qkv(x).view(seq, batch * self.spec.heads, 3 * self.head_size)
        q, k, v = (part.transpose(0, 1) for part in merged.split(self.head_size, 2))
        found = self.probabilities(torch.bmm(q, k.transpose(1, 2)))
        found = torch.bmm(found * KEPT if self.spec.drops else found, v)
        return self.proj(found.transpose(0, 1).reshape(seq, batch, self.spec.hidden))

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scaling and masking are part of the softmax's kernel."""
        return scores.softmax(-1)


class MaskedAttention(StoredAttention):
    """The same without that kernel, as Megatron-LM's `forward_torch_softmax`: scores are scaled by
    the number of the layer and masked by ops of their own, in 32 bits."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec)
        later = torch.ones(spec.seq, spec.seq, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The layer's number stands for any scale."""
        wide = scores.float() * LAYERS if self.spec.scales else scores.float()
        copies = COPIES_OF_VIEW if self.spec.masks_view else COPIES
        masked: Tensor = _Masked.apply(wide, self.get_buffer("later"), copies)
        return masked.softmax(-1).to(scores.dtype)


def attention_of(spec: DecoderSpec) -> FusedAttention:
    """The attention that a decoder has."""
    if spec.is_fused:
        return FusedAttention(spec)
    return StoredAttention(spec) if spec.fuses_mask else MaskedAttention(spec)


class FusedMLP(nn.Module):
    """Two linears around a GELU, the second without a bias, as that of `FusedAttention.proj`."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.fc_in = linear(spec, spec.hidden, spec.ffn, bias=True)
        self.fc_out = linear(spec, spec.ffn, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))


class DecoderBlock(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(spec.hidden), nn.LayerNorm(spec.hidden)
        self.attn = attention_of(spec)
        self.mlp = FusedMLP(spec)
        self.add_1, self.add_2 = AddToResidual(spec), AddToResidual(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = self.add_1(x, self.attn(self.ln_1(x)))
        return self.add_2(x, self.mlp(self.ln_2(x)))


class Decoder(nn.Module):
    """Embeddings, blocks and the loss. Shapes: input_ids and labels are batch x seq."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        is_gated = spec.architecture.is_gated
        block = LlamaBlock if is_gated else DecoderBlock
        self.wte = nn.Embedding(spec.vocab, spec.hidden)
        self.wpe = None if is_gated else nn.Embedding(spec.seq, spec.hidden)
        self.h = nn.ModuleList(block(spec) for _ in range(LAYERS))
        self.ln_f = rms_norm(spec) if is_gated else nn.LayerNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False) if spec.head == "own" else None
        self.is_tied, self.has_batch_first = spec.head == "tied", is_gated or spec.is_fused
        self.loss = spec.loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        if not self.has_batch_first:
            x, labels = x.transpose(0, 1).contiguous(), labels.transpose(0, 1)
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x)
        if self.is_tied:
            logits = F.linear(logits, self.wte.weight)
        elif self.head is not None:
            logits = self.head(logits)
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.loss == "fused":
            return _FusedCrossEntropy.apply(logits, labels)
        kernel = _TorchCrossEntropy if self.loss == "torch" else _CrossEntropy
        return kernel.apply(logits.float(), labels)


@lru_cache(maxsize=4)
def captured_decoder(spec: DecoderSpec, batch: int) -> Program:
    """The step of a decoder of `LAYERS` layers, without memory for its weights."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, spec.dtype))
    try:
        with FakeTensorMode():
            module = Decoder(spec)
            ids = torch.empty(batch, spec.seq, dtype=torch.int64)
            labels = torch.empty(batch, spec.seq, dtype=torch.int64)
        return capture(module, kwargs={"input_ids": ids, "labels": labels})
    finally:
        torch.set_default_dtype(default)
