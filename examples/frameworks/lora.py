# pyright: reportMissingImports=false
"""PEFT's LoRA with TRL's SFTTrainer on a mesh.

    torchrun --nproc-per-node 2 examples/frameworks/lora.py data=2 --zero 3

Without a mesh it is the script for one process. Adapters are saved, and merged into the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import command
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer

import shardweave as sw


def train(mesh: str | None, zero: int, folder: Path, steps: int = 3) -> SFTTrainer:
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model: Any = get_peft_model(tiny.model(), adapter)
    kind: type[SFTTrainer] = SFTTrainer
    if mesh:
        # The loss is made of other outputs than the model's own loss: they are whole on every rank.
        sw.compile(model, kwargs=tiny.batch(), mesh=mesh, zero=zero, outputs="full")
        kind = sw.integrations.transformers.trainer(SFTTrainer)
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,  # the global batch
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=steps,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        max_length=8,
        dataset_kwargs={"skip_prepare_dataset": True},  # rows are tokens already
    )
    rows = Dataset.from_dict({"input_ids": tiny.Rows().ids.tolist()})
    trainer = kind(model, arguments, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    return trainer


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(32)}
    made = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<0>", eos_token="<1>")


if __name__ == "__main__":
    command.run(train, "tuned")
