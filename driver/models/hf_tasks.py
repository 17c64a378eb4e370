"""Training tasks of Hugging Face models, each with its head, batches and loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IGNORED_LABEL = -100  # what torch's and Hugging Face's cross entropy leave out
MASKED_FRACTION = 0.15  # of the tokens that a masked language model is asked for, as in BERT
SEQ2SEQ, IMAGE = "seq2seq language model", "image classification"
MASKED, CAUSAL = "masked language model", "causal language model"
SOUND, OBJECTS = "audio classification", "object detection"


@dataclass(frozen=True)
class InputSize:
    """Sizes of a batch: samples, tokens of a sequence, pixels along an image's side; and its
    dtype."""

    batch: int
    seq: int
    image_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Head:
    """A training task: transformers' auto class, its table of model classes by type, and a function
    that makes a batch of inputs.
    """

    task: str
    auto_class: str
    table: str
    make_inputs: Callable[[PreTrainedConfig, InputSize], dict[str, Tensor]]


def causal_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Mean cross entropy of each next token, in the dtype of the logits.

    Shapes: logits batch x seq x vocab_size, labels batch x seq -> scalar.
    """
    next_labels = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.view(-1, vocab_size), next_labels.view(-1), ignore_index=IGNORED_LABEL
    )


def _random_tokens(config: PreTrainedConfig, size: InputSize) -> Tensor:
    """Shape: batch x seq, int64 in [0, vocabulary)."""
    vocab = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    return torch.randint(0, vocab, (size.batch, size.seq))


def _classes(config: PreTrainedConfig, *shape: int) -> Tensor:
    """Int64 in [0, number of classes)."""
    return torch.randint(0, config.num_labels or 2, shape)


def _causal_inputs(config: PreTrainedConfig, size: InputSize) -> dict[str, Tensor]:
    tokens = _random_tokens(config, size)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _seq2seq_inputs(config: PreTrainedConfig, size: InputSize) -> dict[str, Tensor]:
    return {"input_ids": _random_tokens(config, size), "labels": _random_tokens(config, size)}


def _masked_inputs(config: PreTrainedConfig, size: InputSize) -> dict[str, Tensor]:
    """Tokens, a fraction of them masked for prediction, in sequences padded by up to a quarter."""
    tokens = _random_tokens(config, size)
    lengths = torch.randint(size.seq - size.seq // 4, size.seq + 1, (size.batch, 1))
    is_token = torch.arange(size.seq) < lengths
    scores = torch.rand(size.batch, size.seq).masked_fill(~is_token, 1.0)
    # At least one token a sequence, so that no loss is a mean over nothing.
    limit = scores.amin(dim=1, keepdim=True).clamp(min=MASKED_FRACTION)
    labels = tokens.masked_fill(scores > limit, IGNORED_LABEL)
    return {"input_ids": tokens, "attention_mask": is_token.long(), "labels": labels}


def _image_inputs(config: PreTrainedConfig, size: InputSize) -> dict[str, Tensor]:
    labels = _classes(config, size.batch)
    if getattr(config, "vocab_size", None) and not hasattr(config, "num_channels"):
        return {"input_ids": _random_tokens(config, size), "labels": labels}  # pixels as tokens
    channels = getattr(config, "num_channels", 3)
    shape = (size.batch, channels, size.image_size, size.image_size)
    pixels = torch.randn(shape, dtype=size.dtype)
    return {"pixel_values": pixels, "labels": labels}


def _sound_inputs(config: PreTrainedConfig, size: InputSize) -> dict[str, Tensor]:
    """Waves of `seq` times the samples of a frame, or spectrograms, and a class for each."""
    labels = _classes(config, size.batch)
    shape = size.batch, size.seq * math.prod(getattr(config, "conv_stride", (1,)))
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        shape = size.batch, config.max_length, config.num_mel_bins
    return {"input_values": torch.randn(shape, dtype=size.dtype), "labels": labels}


def _detection_inputs(config: PreTrainedConfig, size: InputSize) -> dict[str, Tensor]:
    """Images, and for each query a class and a box."""
    classes = _classes(config, size.batch, config.num_queries, 1)
    boxes = torch.rand(size.batch, config.num_queries, 4, dtype=size.dtype)
    pixels = torch.randn(size.batch, 3, size.image_size, size.image_size, dtype=size.dtype)
    return {"pixel_values": pixels, "labels": torch.cat([classes.to(size.dtype), boxes], -1)}


def detection_loss(
    logits: Tensor, labels: Tensor, device: object, boxes: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, dict[str, Tensor], None]:
    """Cross entropy of classes and L1 loss of boxes, where query k has to find object k.

    Shapes: logits batch x queries x classes, boxes .. x 4, labels .. x 5, a class and a box.
    """
    classes = F.cross_entropy(logits.flatten(0, 1), labels[..., 0].long().flatten())
    return classes + F.l1_loss(boxes, labels[..., 1:]), {}, None


# In order: a type with several heads takes the first. Bart-like types are trained as seq2seq,
# BERT-like ones as masked models though they can decode too.
HEADS = (
    Head(SEQ2SEQ, "AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", _seq2seq_inputs),
    Head(IMAGE, "AutoModelForImageClassification", "IMAGE_CLASSIFICATION", _image_inputs),
    Head(MASKED, "AutoModelForMaskedLM", "MASKED_LM", _masked_inputs),
    Head(CAUSAL, "AutoModelForCausalLM", "CAUSAL_LM", _causal_inputs),
    Head(SOUND, "AutoModelForAudioClassification", "AUDIO_CLASSIFICATION", _sound_inputs),
    Head(OBJECTS, "AutoModelForObjectDetection", "OBJECT_DETECTION", _detection_inputs),
)
