"""Gradients and parameters on a mesh, of whose norms and infinities every rank hears.

Torch reduces over the mesh of the first DTensor alone. Gradients of pipeline stages are on
different meshes, and different ones are sharded over different axes: ranks would clip, or leave
steps out, each in its own way and in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardweave.ir.torch_private import local_part

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_

NORMS = (torch.linalg.vector_norm, torch.norm, Tensor.norm)


class MeshTensor(DTensor):
    """A gradient on a mesh, or a parameter on the mesh of some stages.

    Its norm on some stages, and the infinities of gradients, are known on all ranks, so that
    `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` work as on one device. Both are
    collective over all ranks: a rank of another stage has the tensor too, with an empty part.
    Functions of several tensors at once, such as `torch._foreach_lerp_`, run mesh by mesh.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        run = partial(super().__torch_function__, func, types)
        if name.startswith("_foreach_"):
            return _by_mesh(run, args, kwargs or {})
        result: Any = run(args, kwargs or {})
        if func is Tensor.detach:
            result.__class__ = cls
        elif func in NORMS and isinstance(result, DTensor) and not result.ndim:
            return _on_all_ranks(result)
        return result


def _by_mesh(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of lists of tensors for the tensors of each mesh by themselves."""
    meshes: dict[DeviceMesh | None, list[int]] = {}
    for index, tensor in enumerate(args[0]):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        meshes.setdefault(mesh, []).append(index)
    count, results = len(args[0]), {}
    for indices in meshes.values():
        part = [
            [arg[i] for i in indices]
            if isinstance(arg, list | tuple) and len(arg) == count
            else arg
            for arg in args
        ]
        results |= zip(indices, run(part, kwargs) or [None] * len(indices), strict=True)
    return [results[index] for index in range(count)]


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
