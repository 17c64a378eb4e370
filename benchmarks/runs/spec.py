"""What a decoder is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardweave.benchmarks.runs.architectures import GPT, Architecture, Head

Loss = Literal["sharded", "fused", "torch"]
"""The cross entropy: Megatron-LM's, of logits cut by words, in place; a kernel that reads logits of
16 bits and keeps no others; or PyTorch's, of logits in 32 bits."""


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes. is_fused: attention is one kernel that stores no scores. fuses_mask: where scores are
    stored, one kernel scales, masks and normalises them. drops_hidden: what a block adds has a bias
    and is dropped. drops, scales: stored scores. masks_view: they are masked where their product
    wrote them. dtype: of everything. key_heads: of keys and values, 0 for as many as of queries.
    architecture: what the blocks are. joins: linear maps of one input are one. fuses_gate: the
    gate's activation and its product are one kernel. fuses_norms: RMS norms and rotary positions
    are kernels, else PyTorch's ops one by one, in 32 bits. casts: what linear maps of blocks read,
    and their gradients, are cast to 8 bits."""

    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    is_fused: bool
    fuses_mask: bool
    dtype: str
    drops_hidden: bool = True
    drops: bool = True
    scales: bool = True
    masks_view: bool = False
    head: Head = "tied"
    key_heads: int = 0
    architecture: Architecture = GPT
    joins: bool = True
    fuses_gate: bool = True
    loss: Loss = "sharded"
    fuses_norms: bool = True
    casts: bool = False

    @property
    def head_size(self) -> int:
        return self.architecture.head_size or self.hidden // self.heads

    @property
    def num_key_heads(self) -> int:
        return self.key_heads or self.heads
