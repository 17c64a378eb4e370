"""The model of a measured run: a decoder of a run's sizes, captured once with a few layers.

What frameworks of these runs compute that `gpt:` does not: attention whose scores are stored, where
a run does not say that it is fused, with the dropout of Megatron-LM as one op of the scores' size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from shardweave.driver.runs.frameworks import Head
from shardweave.ir.capture.capture import capture
from shardweave.ir.program import Program

LAYERS = 3
"""Captured: the first, one that stands for all others, and the last."""

KEPT = 0.9


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes. is_fused: attention is one kernel that stores no scores. fuses_mask: where scores are
    stored, one kernel scales, masks and normalises them. drops, scales: stored scores. dtype: of
    everything."""

    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    is_fused: bool
    fuses_mask: bool
    dtype: str
    drops: bool = True
    scales: bool = True
    head: Head = "tied"


class FusedAttention(nn.Module):
    """Causal attention in one kernel. Queries, keys and values are one product, head by head, and
    what `proj` gives has no bias: frameworks add it in the kernel that adds the residual."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.qkv = nn.Linear(spec.hidden, 3 * spec.hidden)
        self.proj = nn.Linear(spec.hidden, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: batch x seq x hidden -> the same."""
        sizes = (*x.shape[:2], -1, 3, self.spec.hidden // self.spec.heads)
        q, k, v = self.qkv(x).view(sizes).transpose(1, 2).unbind(3)
        return self.proj(self.attended(q, k, v).transpose(1, 2).flatten(2))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes: batch x heads x seq x head_size."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class StoredAttention(FusedAttention):
    """Attention whose scores, probabilities and dropped probabilities are tensors."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = self.probabilities(torch.matmul(q, k.transpose(2, 3)))
        return torch.matmul(found * KEPT if self.spec.drops else found, v)

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
        masked = wide.masked_fill(self.get_buffer("later"), -1e4)
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
        self.fc_in = nn.Linear(spec.hidden, spec.ffn)
        self.fc_out = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))


class DecoderBlock(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(spec.hidden), nn.LayerNorm(spec.hidden)
        self.attn = attention_of(spec)
        self.mlp = FusedMLP(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """Embeddings, blocks and the loss. Shapes: input_ids and labels are batch x seq."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab, spec.hidden)
        self.wpe = nn.Embedding(spec.seq, spec.hidden)
        self.h = nn.ModuleList(DecoderBlock(spec) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False) if spec.head == "own" else None
        self.is_tied = spec.head == "tied"

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x)
        if self.is_tied:
            logits = F.linear(logits, self.wte.weight)
        elif self.head is not None:
            logits = self.head(logits)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@cache
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
