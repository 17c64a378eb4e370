"""The alternative a user has today: PyTorch's own tensor parallelism with checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in the backward pass (non-reentrant)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def torch_step(
    model: nn.Module,
    batch: dict[str, Tensor],
    mesh: DeviceMesh,
    recompute: bool,
    prepared: Callable[[], object] = lambda: None,
) -> Callable[[], Tensor]:
    """One training step (forward and backward) of a `gpt:` model with untied head.

    Columns and rows as Megatron cuts them, the embedding and the loss on vocabulary shards.
    Changes `model` in place. prepared: what else is to be done to it, before the first step.
    """
    block_plan = {
        **{f"attn.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attn.proj": RowwiseParallel(),
        "mlp.fc_in": ColwiseParallel(),
        "mlp.fc_out": RowwiseParallel(),
    }
    blocks = cast(nn.ModuleList, model.h)
    for block in blocks:
        parallelize_module(block, mesh, block_plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(
        model, mesh, {"wte": RowwiseParallel(input_layouts=Replicate()), "head": head}
    )
    if recompute:
        model.h = nn.ModuleList(Checkpointed(block) for block in blocks)
    prepared()
    labels = DTensor.from_local(batch["labels"], mesh, [Replicate()])

    def step() -> Tensor:
        with loss_parallel():
            loss = model(input_ids=batch["input_ids"], labels=labels)
            loss.backward()
        return loss.detach().full_tensor()

    return step


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the original parameter names."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name.replace(".block.", ".")] = torch.Tensor(whole)
    return found
