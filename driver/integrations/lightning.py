# pyright: reportMissingImports=false
"""Lightning: a strategy whose ranks each take the global batch, as one worker does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardweave.backends.state.whole_state import (
    is_first,
    whole_optimizer_states,
    whole_state_dicts,
)
from shardweave.driver.processes import world


def strategy(device: torch.device | str | None = None, **options: Any) -> Any:
    """The strategy for a `lightning.Trainer` whose module holds compiled models.

    Each rank takes all rows of a batch, so that batch sizes, losses and metrics are those of one
    process. Checkpoints hold whole tensors and are written by rank 0; they are read on any mesh.
    device: of this rank; by default the GPU of its index if each rank has one, else the CPU.
    options: those of Lightning's `SingleDeviceStrategy`.
    """
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class ShardedStrategy(_Sharded, SingleDeviceStrategy):
        """A strategy that Lightning treats as a single-device one; the device is one rank of the
        mesh."""

    chosen = world.local_device(world.world_size()) if device is None else torch.device(device)
    made = ShardedStrategy(device=world.with_index(chosen), **options)  # pyright: ignore[reportCallIssue]
    made.global_rank = world.rank()
    return made


class _Sharded:
    """Parts of the strategy that involve the other ranks."""

    lightning_module: Any
    optimizers: Any

    @property
    def is_global_zero(self) -> bool:
        return is_first()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        held = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(held, src)
        return held[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with whole_state_dicts(self.lightning_module.modules(), random=True):
            return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        inner = getattr(optimizer, "_optimizer", optimizer)
        with whole_optimizer_states([inner]):
            return inner.state_dict()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.barrier()
