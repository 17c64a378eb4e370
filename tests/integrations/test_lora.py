# pyright: reportMissingImports=false
"""PEFT's LoRA, TRL's SFTTrainer and DPOTrainer on a compiled model, beside one process."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from shardweave.tests.integrations.frameworks import (
    as_launched,
    check_same,
    example,
    is_first,
    needs,
)
from shardweave.tests.integrations.test_trainer import history
from shardweave.tests.spawn import run_ranks


def tunes_as_on_one_process(root: str, mesh: str, zero: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # what PEFT asks of transformers is deprecated
    from peft import PeftModel
    from safetensors.torch import load_file

    train, folder = example("lora").train, Path(root)
    torch.set_default_dtype(torch.float64)
    theirs = train(None, 0, folder / "alone") if is_first() else None
    with as_launched():
        ours = train(mesh, zero, folder / "ours")
    if theirs is None:
        return
    check_same(history(ours), history(theirs))
    saved, expected = (
        load_file(folder / of / "adapter" / "adapter_model.safetensors") for of in ("ours", "alone")
    )
    check_same(saved, expected)
    plain = PeftModel.from_pretrained(example("tiny").model(), folder / "ours" / "adapter")
    merged = plain.merge_and_unload()
    check_same(merged.state_dict(), theirs.model.merge_and_unload().state_dict())


@needs("peft", "trl", "datasets")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_adapters_are_tuned_saved_and_merged_as_on_one_process(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    run_ranks(tunes_as_on_one_process, 2, str(tmp_path), mesh, zero)


def prefers_as_on_one_process(root: str, mesh: str, zero: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # what TRL asks of transformers is deprecated
    from safetensors.torch import load_file

    train, folder = example("dpo").train, Path(root)
    torch.set_default_dtype(torch.float64)
    theirs = train(None, 0, folder / "alone") if is_first() else None
    with as_launched():
        ours = train(mesh, zero, folder / "ours")
    if theirs is None:
        return
    check_same(history(ours), history(theirs))
    saved, expected = (
        load_file(folder / of / "tuned" / "model.safetensors") for of in ("ours", "alone")
    )
    check_same(saved, expected)


@needs("trl", "datasets")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_preferences_are_trained_beside_a_frozen_reference(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    run_ranks(prefers_as_on_one_process, 2, str(tmp_path), mesh, zero, timeout_s=300)
