"""Hugging Face's Trainer on a compiled model, beside the same script on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from shardweave.tests.integrations.frameworks import (
    as_launched,
    check_same,
    example,
    is_first,
    needs,
    weights,
)
from shardweave.tests.spawn import run_ranks

KEYS = ("step", "loss", "grad_norm", "eval_loss", "train_loss")


def history(trainer: Any) -> list[dict[str, float]]:
    return [{k: e[k] for k in KEYS if k in e} for e in trainer.state.log_history]


def trains_as_on_one_process(root: str, mesh: str, zero: int) -> None:
    train, folder = example("trainer").train, Path(root)
    torch.set_default_dtype(torch.float64)
    theirs = train(None, 0, folder / "alone", 6) if is_first() else None
    with as_launched():
        train(mesh, zero, folder / "ours", 4)
        ours = train(mesh, zero, folder / "ours", 6)  # goes on from the checkpoint
    ours_now = weights(ours.model)
    if theirs is None:
        return
    check_same(history(ours)[:-1], history(theirs)[:-1])
    check_same(ours_now, weights(theirs.model))
    plain = LlamaForCausalLM.from_pretrained(folder / "ours" / "checkpoint-6")
    assert plain.config.architectures == ["LlamaForCausalLM"]
    check_same(plain.state_dict(), weights(theirs.model))


@needs("accelerate", "transformers")
@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("data=2", 3), ("tensor=2", 0)])
def test_a_trainer_evaluates_saves_and_resumes_as_on_one_process(
    tmp_path: Path, mesh: str, zero: int
) -> None:
    run_ranks(trains_as_on_one_process, 2, str(tmp_path), mesh, zero, timeout_s=300)
