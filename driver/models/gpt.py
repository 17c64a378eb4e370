"""A plain GPT in the style of Megatron-LM: the model that `gpt:` specs name.

It is written the way such models usually are, with q, k and v as separate linears, so that
what a planner and a partitioner do to it can be followed by eye.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardweave.driver.models.mixture import DROPPED, Experts, every_expert, experts_with_capacity


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT and of its batch; `ffn` = 0 means 4 * hidden.

    dropout: probability for embeddings, attention weights and ends of residual branches. experts:
    number in each MLP, 0 for a plain MLP; a router chooses `choices` of them for each token.
    capacity: capacity factor of the experts (see `mixture.experts_with_capacity`, with sequences as
    groups); 0: every expert computes every token.
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
    experts: int = 0
    choices: int = 2
    capacity: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            most = min(self.hidden, 1024)
            divisors = [n for n in range(1, most + 1) if self.hidden % n == 0]
            raise ValueError(
                f"gpt: heads={self.heads} does not divide hidden={self.hidden}; "
                f"use one of heads={divisors}, or another hidden."
            )
        if not 0 <= self.dropout <= 1:
            raise ValueError(
                f"gpt: dropout={self.dropout:g} is not a probability; use 0 to 1, such as 0.1."
            )
        if self.experts and self.choices > self.experts:
            raise ValueError(
                f"gpt: choices={self.choices} experts for each token are more than "
                f"experts={self.experts}; use fewer choices, or more experts."
            )
        if self.capacity and not self.experts:
            raise ValueError(
                f"gpt: capacity={self.capacity:g} applies to experts only; give experts=.. too."
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


class MixtureMLP(nn.Module):
    """Mixture of expert MLPs: a token's output is the weighted sum of a few. Shapes as `MLP`.

    up: experts x hidden x ffn. down: experts x ffn x hidden. dropped_choices: as of `mixture`.
    """

    dropped_choices: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        count, hidden, ffn = config.experts, config.hidden, config.ffn_size
        self.choices, self.capacity = config.choices, config.capacity
        self.router = nn.Linear(hidden, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, hidden, ffn))
        self.up_bias = nn.Parameter(torch.zeros(count, ffn))
        self.down = nn.Parameter(torch.empty(count, ffn, hidden))
        self.down_bias = nn.Parameter(torch.zeros(count, hidden))
        if self.capacity:
            self.register_buffer(DROPPED, torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.choices)
        weights = weights / weights.sum(-1, keepdim=True)
        gelu = partial(F.gelu, approximate="tanh")
        experts = Experts(self.up, self.down, gelu, self.up_bias, self.down_bias)
        if not self.capacity:
            return every_expert(tokens, chosen, weights, experts).view(x.shape)
        out, dropped = experts_with_capacity(
            tokens, chosen, weights, experts, capacity=self.capacity, groups=x.shape[0]
        )
        self.dropped_choices.copy_(dropped)
        return out.view(x.shape)


class Block(nn.Module):
    """A pre-LN transformer layer. Shapes: batch x seq x hidden -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = MixtureMLP(config) if config.experts else MLP(config)
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
        """Draw weights as GPT-2: normal, deviation 0.02, smaller at the end of each residual."""
        end_std = 0.02 / math.sqrt(2 * config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.proj", "mlp.fc_out"))
                nn.init.normal_(module.weight, std=end_std if ends_branch else 0.02)
            if isinstance(module, MixtureMLP):
                nn.init.normal_(module.up, std=0.02)
                nn.init.normal_(module.down, std=end_std)
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
