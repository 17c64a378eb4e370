# pyright: reportMissingImports=false
"""torchtitan: a `parallelize_fn` for the trainer, whose ranks each take the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.driver.step.compile import compile

_PRECISIONS = {"float32": None, "bfloat16": "bf16", "float16": "fp16"}


def parallelize(mesh: Any, **options: Any) -> Callable[..., nn.Module]:
    """Make the `parallelize_fn` of a ModelSpec, which compiles its model over a mesh.

    Each rank takes all rows of a batch, as torchtitan's tensor ranks do: set
    `tensor_parallel_degree` to the number of ranks, and `spmd_backend="partial_dtensor"`. Losses,
    norms and counts of tokens are then those of one process. Checkpoints are torchtitan's own.
    options: those of `sw.compile`.

    The function raises ValueError for settings of the trainer that the plan decides instead.
    """

    def parallelize_fn(
        model: nn.Module, *, parallel_dims: Any, training: Any, parallelism: Any, **settings: Any
    ) -> nn.Module:
        _check(parallel_dims, training, parallelism, settings)
        shape = training.local_batch_size, training.seq_len
        positions = torch.arange(shape[1], dtype=torch.int32).repeat(shape[0], 1)
        if _has_masks(model):
            _make_masks_inside(model)
        precision = _PRECISIONS[training.mixed_precision_param]
        tokens = torch.zeros(shape, dtype=torch.int64)
        compile(model, (tokens, positions), mesh=mesh, **{"precision": precision, **options})
        # The trainer would now allocate and fill the parameters, which have their values.
        vars(model).update(to_empty=lambda **_: model, init_weights=lambda **_: None)
        return model

    return parallelize_fn


def _check(dims: Any, training: Any, parallelism: Any, settings: dict[str, Any]) -> None:
    wrong = {
        f"parallelism.tensor_parallel_degree={dims.tp}: set it to {dims.world_size}, the number of "
        "ranks, since each takes all rows of a batch": dims.tp != dims.world_size,
        f'parallelism.spmd_backend="{parallelism.spmd_backend}": set "partial_dtensor", since each '
        "rank gets whole logits": parallelism.spmd_backend != "partial_dtensor",
        "activation_checkpoint: set it to None; a plan says what is recomputed (recompute)": (
            settings["ac_config"] is not None
        ),
        "compile.enable: leave it out; the model is compiled, by PyTorch's compiler with "
        'parallelize(.., backend="inductor")': settings["compile_config"].enable,
        "training.enable_cpu_offload: leave it out": training.enable_cpu_offload,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"torchtitan's {what}.")


def _has_masks(model: nn.Module) -> bool:
    kinds = {type(module).__name__ for module in model.modules()}
    return bool(kinds & {"FlexAttention", "VarlenAttention"})


def _make_masks_inside(model: Any) -> None:
    """Let forward make its attention masks, which are no tensors, from positions."""
    kind = type(model)

    def forward(self: Any, tokens: Tensor, positions: Tensor, attention_masks: None = None) -> Any:
        masks = kind.get_attention_masks(self, positions=positions)
        return kind.forward(self, tokens, positions=positions, attention_masks=masks)

    members = {"forward": forward, "get_attention_masks": lambda *_, **__: None}
    model.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
