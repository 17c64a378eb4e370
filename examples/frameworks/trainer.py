# pyright: reportMissingImports=false
"""Hugging Face's Trainer on a mesh: two lines beside the same script for one process.

    torchrun --nproc-per-node 2 examples/frameworks/trainer.py data=2 --zero 3

Without a mesh it is that script. It trains with evaluation and checkpoints; run again, it goes on
from the last checkpoint, which plain transformers read too.
"""

from __future__ import annotations

from pathlib import Path

import command
import tiny
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardweave as sw


def train(mesh: str | None, zero: int, folder: Path, steps: int = 4) -> Trainer:
    model = tiny.model()
    kind: type[Trainer] = Trainer
    if mesh:
        sw.compile(model, kwargs=tiny.batch(), mesh=mesh, zero=zero)
        kind = sw.integrations.transformers.trainer(Trainer)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,  # the global batch
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = kind(model, arguments, train_dataset=tiny.Rows(), eval_dataset=tiny.Rows(8))
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    return trainer


if __name__ == "__main__":
    command.run(train, "trained")
