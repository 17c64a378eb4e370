"""A plain GPT in the style of Megatron-LM: the model that `gpt:` specs name.

It is written the way such models usually are, with q, k and v as separate linears, so that
what a planner and a partitioner do to it can be followed by eye.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT and of its batch; `ffn` = 0 means 4 * hidden.

    dropout: the part of the embeddings, attention weights and ends of branches that is dropped.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    vocab: int = 128
    seq: int = 32
    batch: int = 8
    ffn: int = 0
    tie: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            divisors = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
            raise ValueError(
                f"gpt: heads={self.heads} does not divide hidden={self.hidden}; "
                f"use one of heads={divisors}, or another hidden."
            )

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden


class Attention(nn.Module):
    """Causal self-attention. Shapes: batch x seq x hidden -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.dropout = config.dropout
        sizes = config.hidden, config.hidden
        self.q, self.k, self.v, self.proj = (nn.Linear(*sizes) for _ in range(4))

    def split_heads(self, x: Tensor) -> Tensor:
        """Shapes: batch x seq x hidden -> batch x heads x seq x head_size."""
        batch, seq, hidden = x.shape
        return x.view(batch, seq, hidden // self.head_size, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(project(x)) for project in (self.q, self.k, self.v))
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears around a GELU. Shapes: batch x seq x hidden -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(config.hidden, config.ffn_size)
        self.fc_out = nn.Linear(config.ffn_size, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-LN transformer layer. Shapes: batch x seq x hidden -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """A GPT with its loss: the mean cross entropy of the next tokens.

    Shapes: input_ids and labels are batch x seq, int64 in [0, vocab); the result is a scalar.
    `labels[b, t]` is the token that follows `input_ids[b, :t + 1]`; nothing is shifted here.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.seq, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self._initialise(config)
        if config.tie:
            self.head.weight = self.wte.weight

    def _initialise(self, config: GPTConfig) -> None:
        """Draw weights as GPT-2 does: normal of 0.02, the residual branches' ends scaled down."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.proj", "mlp.fc_out"))
                std = 0.02 / math.sqrt(2 * config.layers) if ends_branch else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if logits.dtype in (torch.bfloat16, torch.float16):
            # Eight or eleven bits are too few for a sum over the vocabulary.
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def build_gpt(config: GPTConfig) -> tuple[GPT, dict[str, Tensor]]:
    """Build the model and one batch of random tokens, from torch's global random state."""
    module = GPT(config)
    tokens = torch.randint(0, config.vocab, (config.batch, config.seq + 1))
    inputs = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return module, inputs
