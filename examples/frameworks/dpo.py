# pyright: reportMissingImports=false
"""TRL's DPOTrainer on a mesh, beside a frozen reference.

    torchrun --nproc-per-node 2 examples/frameworks/dpo.py data=2 --zero 3

Without a mesh it is the script for one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import command
import tiny
from datasets import Dataset
from lora import tokenizer
from trl import DPOConfig, DPOTrainer

import shardweave as sw


def train(mesh: str | None, zero: int, folder: Path, steps: int = 3, **options: Any) -> DPOTrainer:
    model: Any = tiny.model()
    reference = tiny.model().requires_grad_(False)
    kind: type[DPOTrainer] = DPOTrainer
    if mesh:
        # The loss is made of other outputs than the model's own loss: they are whole on every rank.
        sw.compile(model, kwargs=tiny.batch(8), mesh=mesh, zero=zero, outputs="full")
        kind = sw.integrations.transformers.trainer(DPOTrainer)
    arguments = DPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,  # the global batch, of pairs
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=steps,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        max_length=8,
        **options,
    )
    texts = [[f"<{token}>" for token in row] for row in tiny.Rows(32).ids.tolist()]
    rows = {
        "prompt": [" ".join(words[:3]) for words in texts[:16]],
        "chosen": [" ".join(["", *words[3:7], "<1>"]) for words in texts[:16]],
        "rejected": [" ".join(["", *words[4:7], "<1>"]) for words in texts[16:]],
    }
    trainer = kind(
        model,
        reference,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    trainer.save_model(str(folder / "tuned"))
    return trainer


if __name__ == "__main__":
    command.run(train, "preferred")
