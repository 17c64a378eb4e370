# pyright: basic
"""Hugging Face models traced as they run in eager mode: causal attention stays causal.

When they are traced, these models write out an S x S mask, and repeat keys and values for it, that
eager mode, having looked at the data, leaves to the attention kernel.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from unittest import mock

from torch import nn


@contextlib.contextmanager
def eager_masks(inputs: Collection[str]) -> Iterator[None]:
    """Without a mask for packed sequences, unless positions are given that may be packed.

    Positions that a model makes itself count from 0, and eager mode finds that they are of one
    sequence. inputs: the names of the model's inputs.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or "position_ids" in inputs:
        yield
        return
    with mock.patch.object(masks, "find_packed_sequence_indices", _one_sequence):
        yield


def _one_sequence(*args: object, **kwargs: object) -> None:
    return None


@contextlib.contextmanager
def without_cache(model: nn.Module, is_step: bool) -> Iterator[None]:
    """A step returns no keys and values for later tokens: it trains or evaluates, in one pass."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [c for c in configs.values() if is_step and getattr(c, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
