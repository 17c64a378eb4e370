"""The norm of gradients that are on different devices: those of pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardweave.backends.distributed.in_flight import start_maximum


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of parameters so that their norm is at most `max_norm`. Collective.

    norm_type: the p of the norm of all of them together; infinity is the largest entry.

    As `torch.nn.utils.clip_grad_norm_`, which it equals, but for gradients that are DTensors on
    different devices as well, as those of a pipeline's stages are. Returns the norm before, the
    same on every rank; NaN if a gradient has one. Raises ValueError for a norm that is none
    (norm_type <= 0), and for a gradient that is a pending sum (`step.no_sync`).
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type:g} is no norm; give a number above 0, or inf.")
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_max = norm_type == math.inf
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for local, copies in _held(gradients):
        norm = torch.linalg.vector_norm(local, norm_type).double()
        total = torch.maximum(total, norm) if is_max else total + norm**norm_type / copies
    if any(isinstance(one, DTensor) for one in parameters):  # a rank may have no gradients
        if is_max:
            total = start_maximum(total).wait()
        else:
            dist.all_reduce(total)
    found = total if is_max else total ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (found + 1e-6), max=1.0)
    for local, _ in _held(gradients):
        local.mul_(scale.to(local.dtype))
    return found.to(gradients[0].dtype if gradients else torch.float32)


def _held(gradients: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """What this rank has of gradients, and how many ranks have the same."""
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            yield gradient, 1
            continue
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            raise ValueError(
                "a gradient is a pending sum over ranks; call the step outside no_sync() before "
                "its norm is taken."
            )
        mesh, local = gradient.device_mesh, gradient.to_local()
        if mesh.get_coordinate() is not None and local.numel():
            copies = [
                mesh.size(dim)
                for dim, placement in enumerate(gradient.placements)
                if isinstance(placement, Replicate)
            ]
            yield local, math.prod(copies)
