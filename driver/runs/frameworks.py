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
    """precision, vocab: of a run that does not say it. pads_vocab: to a multiple of the tensor
    degree; else each rank has its share, rounded down. drops_hidden: whether what a block adds to
    the residual stream has a bias and is dropped. drops_scores, scales_scores: whether stored
    scores are dropped, and scaled by an op of their own. masks_view: whether they are masked in
    place where their product wrote them, as a view of it. waits_for_sends: whether a stage stands
    still until what it hands on is there. heads: by model, where the head is not tied. held_bytes:
    of a device, beside all tensors: its context, kernels and buffers of messages.
    """

    precision: str = "fp16"
    vocab: int = 51200
    pads_vocab: bool = True
    drops_hidden: bool = True
    drops_scores: bool = True
    scales_scores: bool = True
    masks_view: bool = False
    waits_for_sends: bool = True
    heads: Mapping[str, Head] = field(default_factory=dict[str, Head])
    held_bytes: float = 0.0


SAILOR = Framework(
    precision="tf32",
    drops_hidden=False,
    drops_scores=False,
    scales_scores=False,
    masks_view=True,
    heads={"OPT-350M": "own", "GPT-Neo-2.7B": "none"},
    held_bytes=5.06e9,
)
"""Sailor's Megatron-DeepSpeed (github.com/eth-easl/sailor, MIT). Its scripts set no precision of 16
bits, and NVIDIA's container, in which it runs, allows TF32. `opt_model.py` and `gpt_neo_model.py`
drop and scale no scores, mask those that `baddbmm` wrote through a view of them, and add what a
block gives without its bias; the one ends in a projection of its own, the other in a norm. Memory
is what `nvidia-smi` says, for which its simulator (`runtime_simulator.py`) counts 4.76 GB and
300 MB beside tensors."""

COMPOSER = Framework(drops_hidden=False)
"""llm-foundry's MPT (github.com/mosaicml/llm-foundry, Apache-2.0): no biases, no dropout."""

ONEFLOW = Framework(waits_for_sends=False)
"""OneFlow (Yuan et al. 2021, arXiv:2110.15032, Sec. 4): an actor works while what it gave is on its
way."""

VTRAIN = Framework(vocab=50257, pads_vocab=False)
"""vTrain's GPT (github.com/VIA-Research/vTrain, MIT): `src/model/gpt_model.py` has GPT-2's 50,257
words, and each rank has `vocab_size // world_size` of them."""

FRAMEWORKS: Mapping[str, Framework] = {
    "Sailor (Megatron-DeepSpeed)": SAILOR,
    "Composer FSDP": COMPOSER,
    "OneFlow": ONEFLOW,
}

SOURCES: Mapping[str, Framework] = {"vtrain": VTRAIN}
"""By the first word of a source whose runs' framework is known by another name."""

USUAL = Framework()


def framework_of(name: str, source: str = "") -> Framework:
    """What is known of a framework by its name, or by the source of the runs."""
    return FRAMEWORKS.get(name) or SOURCES.get(source.partition("_")[0], USUAL)
