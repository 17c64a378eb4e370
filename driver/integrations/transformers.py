"""Hugging Face's Trainer, and its subclasses such as TRL's, on a compiled model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardweave.backends.state.state import state_of
from shardweave.backends.state.whole_state import whole_optimizer_states, whole_state_dicts
from shardweave.driver.integrations import accelerate
from shardweave.ir.library.philox import STATE

_T = TypeVar("_T", bound=type)

RANDOM = f"{STATE}.pt"
"""The file of a checkpoint with the state of the model's random numbers."""


@functools.cache
def trainer(kind: _T) -> _T:
    """Subclass `kind`, a `transformers.Trainer` or a subclass of it, for compiled models.

    Each rank takes all rows of a batch, so that batch sizes, losses and metrics are those of one
    process; the model is not wrapped. Checkpoints hold whole tensors and are written by rank 0;
    they are read on any mesh, and by plain transformers.
    """
    return type(kind.__name__, (_Sharded, kind), {"__module__": kind.__module__})  # pyright: ignore[reportReturnType]


class _Sharded:
    """Parts of a trainer that differ for a compiled model: the number of workers, and saving."""

    model: Any
    args: Any
    optimizer: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        accelerate.see_one_worker(cpu=self.args.use_cpu)
        super().create_accelerator_and_postprocess()  # pyright: ignore[reportAttributeAccessIssue]
        self.accelerator.__class__ = accelerate.accelerator(type(self.accelerator))
        # What is not stated means "from rank 0" for datasets without a length.
        if self.accelerator.dataloader_config.dispatch_batches is None:
            self.accelerator.dataloader_config.dispatch_batches = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with whole_state_dicts([self.model]):
            super().save_model(output_dir, _internal_call)  # pyright: ignore[reportAttributeAccessIssue]
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # pyright: ignore[reportAttributeAccessIssue]
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        with whole_optimizer_states([inner]):
            super()._save_optimizer_and_scheduler(output_dir)  # pyright: ignore[reportAttributeAccessIssue]

    def _save_rng_state(self, output_dir: str) -> None:
        if not self.args.should_save:
            return
        super()._save_rng_state(output_dir)  # pyright: ignore[reportAttributeAccessIssue]
        state = state_of(self.model)
        if state is not None and ("buffer", STATE) in state.stored:
            drawing = state.backend.local(state.stored["buffer", STATE])
            torch.save(drawing.detach().cpu().clone(), Path(output_dir) / RANDOM)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # pyright: ignore[reportAttributeAccessIssue]
        path = None if checkpoint is None else Path(checkpoint) / RANDOM
        if path is not None and path.exists() and state_of(self.model) is not None:
            drawing = torch.load(path, weights_only=True)
            self.model.load_state_dict({STATE: drawing}, strict=False)
