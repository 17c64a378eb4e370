# pyright: reportMissingImports=false
"""A tiny language model and its data, for the examples beside this file."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM


def model() -> LlamaForCausalLM:
    """A Llama of one layer, the same in each process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


class Rows(Dataset):
    """Rows of random tokens, each the same in every process."""

    def __init__(self, size: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(32, (size, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def batch(rows: int = 4) -> dict[str, Tensor]:
    """An example batch, the global one."""
    ids = Rows().ids[:rows]
    return {"input_ids": ids, "labels": ids.clone()}
