"""Tiny configurations of types whose fields depend on one another, and inputs of odd kinds."""

from __future__ import annotations

import pytest
import torch

from shardweave.driver.models.hf import build_hf

TYPES = {
    "deepseek_v32": "keys of latent attention are for each head",
    "bamba": "heads of Mamba divide its inner size",
    "cwm": "the ends of text are needed",
    "xmod": "a language is needed",
    "imagegpt": "pixels are tokens",
    "audio-spectrogram-transformer": "sound comes as a spectrogram",
    "blt": "tokens are bytes, in patches",
}


@pytest.mark.parametrize("name", TYPES, ids=TYPES.get)
def test_tiny_type_builds_and_has_a_loss(name: str) -> None:
    torch.manual_seed(0)
    model, batch, _ = build_hf(name, {"tiny": True}, torch.float64)
    assert model(**batch).loss.isfinite()
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
