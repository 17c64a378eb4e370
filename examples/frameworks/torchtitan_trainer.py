# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""torchtitan's trainer on a mesh: its `parallelize_fn` and two settings beside one process.

torchrun --nproc-per-node 2 examples/frameworks/torchtitan_trainer.py data=2 --zero 3

Without a mesh it is the script for one process. torchtitan needs a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command
import torch
from torch import Tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

import shardweave as sw

WORDS = 64


class Bytes(BaseTokenizer):
    """A tokenizer that the trainer asks for nothing."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return [int(byte) for byte in str(args[0]).encode()]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return bytes(args[0]).decode()

    def get_vocab_size(self) -> int:
        return WORDS


class Rows(BaseDataLoader):
    """Rows of random tokens, which go on where a checkpoint left them."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.shape, self.batch = (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            made = torch.Generator().manual_seed(self.batch)
            tokens = torch.randint(WORDS, self.shape, generator=made)
            self.batch += 1
            positions = torch.arange(self.shape[1] - 1).repeat(self.shape[0], 1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = state_dict["batch"]


def tiny() -> ModelSpec:
    """Two layers of torchtitan's llama3."""
    spec = llama3.model_registry("debugmodel")
    config: Any = spec.model
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = WORDS
    config.layers = config.layers[:2]
    return dataclasses.replace(spec, state_dict_adapter=None)


def train(
    mesh: str | None, zero: int, folder: Path, steps: int = 4, **options: Any
) -> tuple[torch.nn.Module, list[tuple[float, float]]]:
    """The model, and the loss and the norm of gradients in each step."""
    spec, parallelism = tiny(), ParallelismConfig()
    if mesh:
        parallelize = sw.integrations.torchtitan.parallelize(mesh, zero=zero, **options)
        spec = dataclasses.replace(spec, parallelize_fn=parallelize)
        ranks = int(os.environ["WORLD_SIZE"])
        parallelism = ParallelismConfig(
            tensor_parallel_degree=ranks, spmd_backend="partial_dtensor"
        )
    config = Trainer.Config(
        model_spec=spec,
        parallelism=parallelism,
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=default_adamw(lr=8e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=16,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Rows.Config(),
        tokenizer=Bytes.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        debug=DebugConfig(seed=1),
        dump_folder=str(folder),
    )
    trainer: Any = config.build()
    numbers: list[tuple[float, float]] = []
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, worst: float, norm: float, **more: Any) -> None:
        numbers.append((loss, norm))
        log(step, loss, worst, norm, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    return trainer.model_parts[0], numbers


if __name__ == "__main__":
    _, numbers = command.run(train, "outputs")
    if int(os.environ["RANK"]) == 0:
        print(f"losses: {[round(loss, 6) for loss, _ in numbers]}")
