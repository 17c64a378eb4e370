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

from shardweave.driver.gpt import MLP, Attention, GPTConfig
from shardweave.ir.capture.capture import capture
from shardweave.ir.program import Program

LAYERS = 3
"""Captured: the first, one that stands for all others, and the last."""

KEPT = 0.9


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes. is_fused: attention is one kernel that stores no scores. fuses_mask: where scores are
    stored, one kernel scales, masks and normalises them. dtype: of everything."""

    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    is_fused: bool
    fuses_mask: bool
    dtype: str


class StoredAttention(Attention):
    """Attention whose scores, probabilities and dropped probabilities are tensors."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(project(x)) for project in (self.q, self.k, self.v))
        dropped = self.probabilities(torch.matmul(q, k.transpose(2, 3))) * KEPT
        return self.proj(torch.matmul(dropped, v).transpose(1, 2).flatten(2))

    def probabilities(self, scores: Tensor) -> Tensor:
        """Scaling and masking are part of the softmax's kernel."""
        return scores.softmax(-1)


class MaskedAttention(StoredAttention):
    """The same without that kernel, as Megatron-LM's `forward_torch_softmax`: scores are scaled by
    the number of the layer and masked by ops of their own, in 32 bits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        later = torch.ones(config.seq, config.seq, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The layer's number stands for any scale."""
        masked = (scores.float() * LAYERS).masked_fill(self.get_buffer("later"), -1e4)
        return masked.softmax(-1).to(scores.dtype)


def attention_of(spec: DecoderSpec) -> type[Attention]:
    """The attention that a decoder has."""
    if spec.is_fused:
        return Attention
    return StoredAttention if spec.fuses_mask else MaskedAttention


class DecoderBlock(nn.Module):
    def __init__(self, config: GPTConfig, attention: type[Attention]) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attn = attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """Embeddings, blocks and the loss. Shapes: input_ids and labels are batch x seq."""

    def __init__(self, config: GPTConfig, attention: type[Attention]) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.seq, config.hidden)
        self.h = nn.ModuleList(DecoderBlock(config, attention) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@cache
def captured_decoder(spec: DecoderSpec, batch: int) -> Program:
    """The step of a decoder of `LAYERS` layers, without memory for its weights."""
    config = GPTConfig(
        layers=LAYERS, hidden=spec.hidden, heads=spec.heads, vocab=spec.vocab,
        seq=spec.seq, batch=batch, ffn=spec.ffn,
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, spec.dtype))
    try:
        with FakeTensorMode():
            module = Decoder(config, attention_of(spec))
            ids = torch.empty(batch, spec.seq, dtype=torch.int64)
            labels = torch.empty(batch, spec.seq, dtype=torch.int64)
        return capture(module, kwargs={"input_ids": ids, "labels": labels})
    finally:
        torch.set_default_dtype(default)
