"""Gradients on a mesh, of whose norms and infinities every rank hears.

Torch reduces over the mesh of the first DTensor alone. Gradients of pipeline stages are on
different meshes, and different ones are sharded over different axes: ranks would clip, or leave
steps out, each in its own way and in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.ir.torch_private import local_part

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_

NORMS = (torch.linalg.vector_norm, torch.norm, Tensor.norm)


class Gradient(DTensor):
    """A gradient as a DTensor. Its norm on some stages, and its infinities, are known everywhere.

    So `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` work as on one device. Both are
    collective over all ranks: a rank of another stage has the gradient too, with an empty part.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in NORMS and isinstance(result, DTensor) and not result.ndim:
            return _on_all_ranks(result)
        return result


def _unscale(gradients: Sequence[Tensor], is_infinite: Tensor, inverse: Tensor) -> None:
    """Unscale gradients, and tell all ranks if any of one is infinite or NaN."""
    parts = [local_part(g) if isinstance(g, DTensor) else g for g in gradients]
    UNSCALE([part for part in parts if part.numel()], is_infinite, inverse)
    dist.all_reduce(is_infinite, dist.ReduceOp.MAX)


def _on_all_ranks(scalar: DTensor) -> Tensor:
    """A scalar on the ranks of some stages, on all of them."""
    ranks = scalar.device_mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return scalar
    if dist.get_rank() in ranks:
        value = scalar.full_tensor()
    else:
        value = torch.empty((), dtype=scalar.dtype, device=scalar.device)
    dist.broadcast(value, src=ranks[0])
    return value
