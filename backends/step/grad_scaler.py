"""A loss scale that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardweave.ir.mesh.mesh import Mesh


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for the gradients of a step on a mesh.

    Of an infinite gradient on one rank every rank hears, so that all leave out the same steps and
    have the same scale. Torch's own asks the ranks over which the first gradient is sharded, and
    ranks drift apart where another one is sharded over more. `unscale_` and `step` are collective.
    """

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found_inf = super()._unscale_grads_(*args, **kwargs)
        if dist.is_initialized():
            for found in found_inf.values():
                dist.all_reduce(found, dist.ReduceOp.MAX)
        return found_inf


def loss_scale_of(given: Any, device: torch.device, mesh: Mesh) -> float | Tensor:
    """A loss scale as a number or a scalar; that of a GradScaler, which hears that it is used.

    Raises ValueError for torch's own GradScaler on a mesh.
    """
    if not isinstance(given, torch.amp.GradScaler):
        return 1.0 if given is None else given
    if mesh.num_devices > 1 and not isinstance(given, GradScaler):
        raise ValueError(
            "loss_scale is a torch.amp.GradScaler, whose ranks may not agree on which gradients "
            "are infinite; use shardweave.GradScaler, which is the same but for that."
        )
    return given.scale(torch.ones((), device=device))
