"""Which decoder a measured run trains: GPT's, or one of Llama's kind.

A row has sizes and a name, and no architecture. It is told by, in this order, the name of the
model, fewer heads of keys than of queries, the framework, some of which train one kind alone, and
the width of the MLP: a GPT's is four times its hidden features.
What families of models do is in their published configurations (`config.json` of Hugging Face's
Hub): `tie_word_embeddings`, `attention_bias`, `head_dim`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Head = Literal["tied", "own", "none"]
"""The projection to the vocabulary: the embedding's weight, one of its own, or there is none, and
the loss is taken of the hidden features."""


@dataclass(frozen=True)
class Architecture:
    """name: as it is told. is_gated: a gated MLP of three matrices, RMS norms, rotary positions, no
    biases and no dropout; else two matrices around a GELU, layer norms, learned positions. head: of
    models of all sizes; tied_below: tied in those of fewer hidden features. has_qkv_biases,
    norms_heads: of queries and keys. head_size: where it is not the hidden features over the heads.
    """

    name: str
    is_gated: bool = False
    head: Head = "tied"
    tied_below: int = 0
    has_qkv_biases: bool = False
    norms_heads: bool = False
    head_size: int = 0
    vocab: int = 51200

    def head_of(self, hidden: int) -> Head:
        """The projection to the vocabulary of a model of so many features."""
        return "tied" if hidden < self.tied_below else self.head


GPT = Architecture("gpt")
LLAMA = Architecture("llama", is_gated=True, head="own", vocab=32000)
LLAMA_3 = replace(LLAMA, vocab=128256)
QWEN = replace(LLAMA, name="qwen2", tied_below=3584, has_qkv_biases=True, vocab=152064)
"""Tied below 7B, which has 3584 features."""

FAMILIES: Mapping[str, Architecture] = {
    # Of Llama 3.2 those of 1B and 3B (2048 and 3072 features) are tied; TinyLlama of 2048 is not.
    "tinyllama": LLAMA,
    "llama3.2": replace(LLAMA_3, tied_below=4096),
    "llama3": LLAMA_3,
    **{name: LLAMA for name in ("llama", "vicuna", "mistral", "internlm", "baichuan", "deepseek")},
    **{name: LLAMA for name in ("yi", "openllama", "codellama", "ministral", "skywork")},
    "smollm": replace(LLAMA, head="tied", vocab=49152),
    # Qwen 3 has norms of heads of 128 where Qwen 2 has biases.
    "qwen3": replace(QWEN, name="qwen3", has_qkv_biases=False, norms_heads=True, head_size=128),
    "qwen": QWEN,
    "gemma": replace(LLAMA, name="gemma", head="tied", head_size=256, vocab=256000),
    **{name: GPT for name in ("gpt", "megatron", "turing", "opt", "bloom", "mpt")},
}
"""By what a model's name begins with, or a word of it; the first that fits."""


@dataclass(frozen=True)
class Told:
    """An architecture, and by what it is told."""

    architecture: Architecture
    reason: str


PLAIN = Told(GPT, "nothing that says otherwise")


def architecture_of(
    model: str, *, hidden: int, ffn: int, heads: int, key_heads: int, is_gated: bool
) -> Told:
    """The architecture of a row. ffn: 0 where it does not say. is_gated: whether its framework
    trains models of Llama's kind alone.

    What nothing tells is a GPT.
    """
    plain = re.sub(r"[\s_-]+", "", model.lower())
    words = [plain, *re.split(r"[^a-z0-9.]+", model.lower())]
    for name, found in FAMILIES.items():
        if any(word.startswith(name) for word in words):
            return Told(found, f"the model's name, '{model}'")
    if key_heads < heads:
        return Told(LLAMA, f"{key_heads} heads of keys (kv_heads) for {heads} of queries")
    if is_gated:
        return Told(LLAMA, "the framework, which trains models of Llama's kind")
    if ffn not in (0, 4 * hidden):
        return Told(LLAMA, f"an MLP of {ffn} features (ffn), not four times {hidden}")
    return PLAIN
