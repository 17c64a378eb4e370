# pyright: reportMissingImports=false
"""PEFT's LoRA, TRL's SFTTrainer and DPOTrainer on a compiled model, beside one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardweave.tests.integrations.frameworks import (
    as_launched,
    check_same,
    example,
    is_first,
    needs,
)
from shardweave.tests.integrations.test_trainer import history
from shardweave.tests.spawn import run_ranks

SAVED = {"lora": "adapter/adapter_model.safetensors", "dpo": "tuned/model.safetensors"}
"""The file of weights that each example saves."""


def trains_as_on_one_process(
    name: str, root: str, mesh: str, zero: int, options: dict[str, Any]
) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # PEFT and TRL call deprecated functions
    train, folder = example(name).train, Path(root)
    torch.set_default_dtype(torch.float64)
    theirs = train(None, 0, folder / "alone", **options) if is_first() else None
    with as_launched():
        ours = train(mesh, zero, folder / "ours", **options)
    if theirs is None:
        return
    check_same(history(ours), history(theirs))
    saved, expected = (load_file(folder / run / SAVED[name]) for run in ("ours", "alone"))
    check_same(saved, expected)
    if name == "lora":
        check_merged(folder / "ours" / "adapter", theirs.model)


def check_merged(adapter: Path, tuned: Any) -> None:
    """Raises AssertionError unless a saved adapter, merged into a plain model, gives `tuned`."""
    from peft import PeftModel

    plain = PeftModel.from_pretrained(example("tiny").model(), adapter)
    check_same(plain.merge_and_unload().state_dict(), tuned.merge_and_unload().state_dict())


@needs("peft", "trl", "datasets")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_adapters_are_tuned_saved_and_merged_as_on_one_process(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    run_ranks(trains_as_on_one_process, 2, "lora", str(tmp_path), mesh, zero, {}, timeout_s=300)


@needs("trl", "datasets")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_preferences_are_trained_beside_a_frozen_reference(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    """Adam divides by epsilon where a gradient is smaller, and so amplifies its rounding.

    The model is in float64, but Llama's norms and TRL's log-probabilities are in float32, so that
    gradients differ by 1e-8. One gradient of q_proj is 3.4e-9: with Adam's own epsilon, 1e-8, its
    rounding of 4e-12 moves the weight by 2e-6. With 1e-4 the weights still move by about 1e-3, a
    thousand times the tolerance.
    """
    options = {"adam_epsilon": 1e-4}
    run_ranks(trains_as_on_one_process, 2, "dpo", str(tmp_path), mesh, zero, options, timeout_s=300)
