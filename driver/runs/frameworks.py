"""What frameworks of measured runs do that their rows do not say, read off their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Head = Literal["tied", "own", "none"]
"""The projection to the vocabulary: the embedding's weight, one of its own, or there is none, and
the loss is taken of the hidden features."""


@dataclass(frozen=True)
class Framework:
    """precision: of a run that does not say it. drops_scores, scales_scores: whether stored scores
    are dropped, and scaled by an op of their own. heads: by model, where the head is not tied.
    held_bytes: of a device, beside all tensors: its context, kernels and buffers of messages.
    """

    precision: str = "fp16"
    drops_scores: bool = True
    scales_scores: bool = True
    heads: Mapping[str, Head] = field(default_factory=dict[str, Head])
    held_bytes: float = 0.0


SAILOR = Framework(
    precision="tf32",
    drops_scores=False,
    scales_scores=False,
    heads={"OPT-350M": "own", "GPT-Neo-2.7B": "none"},
    held_bytes=5.06e9,
)
"""Sailor's Megatron-DeepSpeed (github.com/eth-easl/sailor, MIT). Its scripts set no precision of 16
bits, and NVIDIA's container, in which it runs, allows TF32. `opt_model.py` and `gpt_neo_model.py`
drop and scale no scores; the one ends in a projection of its own, the other in a norm. Memory is
what `nvidia-smi` says, for which its simulator (`runtime_simulator.py`) counts 4.76 GB and 300 MB
beside tensors."""

FRAMEWORKS: Mapping[str, Framework] = {"Sailor (Megatron-DeepSpeed)": SAILOR}

USUAL = Framework()


def framework_of(name: str) -> Framework:
    return FRAMEWORKS.get(name, USUAL)
