"""Tensors on a mesh that users hold: parameters, buffers, gradients and outputs.

Every rank knows their norms, and whether they have infinities; and they mix with plain tensors.

Torch reduces over the mesh of the first DTensor alone. Gradients of pipeline stages are on
different meshes, and may be sharded over different axes: without this module, each rank would
silently clip gradients, or skip steps, in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardweave.backends.distributed.in_flight import start_maximum
from shardweave.backends.optimizers.shards import full_value, is_everywhere
from shardweave.backends.state.on_whole import are_mixed, on_whole_tensors, whole_tensor
from shardweave.ir.torch_private import dtensor_spec, local_part, pytree

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_

NORMS = (torch.linalg.vector_norm, torch.norm, Tensor.norm)

_OF_AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""Functions that accept DTensors and plain tensors together."""


_TO_THE_HOST = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
"""Functions that return values outside of torch: the full tensor's."""


class MeshTensor(DTensor):
    """A parameter, buffer, gradient or output on the mesh of a step, or of some stages.

    All ranks get its norm, even if only some stages have it, and learn of infinite gradients, so
    that `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` work as on one device. Both are
    collective over all ranks: a rank of another stage has the tensor with an empty shard. Functions
    of lists of tensors, such as `torch._foreach_lerp_`, run mesh by mesh. A function that also
    takes plain tensors runs on full tensors (`on_whole`), and so do `numpy()` and `tolist()`.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        run = super().__torch_function__
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or func in _OF_AUTOGRAD:
            return of_mesh(run(func, types, args, kwargs or {}))
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func in _TO_THE_HOST or (len(tensors) > 1 and are_mixed(tensors)):
            return on_whole_tensors(func, args, kwargs)
        if (func in NORMS or name == "_foreach_norm") and _is_of_infinity(args, kwargs):
            return _largest(args[0])
        if name.startswith("_foreach_"):
            return _by_mesh(partial(run, func, types), args, kwargs)
        result: Any = run(func, types, args, kwargs)
        if func in NORMS and isinstance(result, DTensor) and not result.ndim:
            # On all ranks, also if only some stages have it.
            return result if is_everywhere(result.device_mesh) else full_value(result)
        return of_mesh(result)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Gather the full tensor on every rank, also on ranks of other stages. Collective."""
        if is_everywhere(self.device_mesh):
            return super().full_tensor(grad_placements=grad_placements)
        return whole_tensor(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy_of_tensor(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As torch's own class, which torch.load takes for data.
        local = local_part(self).detach()  # without what checkpoints ask of strided shards
        plain = DTensor(local, dtensor_spec(self), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)


def copy_of_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor; for a parameter, also its attributes and its gradient."""
    made = tensor.detach().clone()
    if not isinstance(tensor, nn.Parameter):
        return made
    new = nn.Parameter(made, tensor.requires_grad)
    new.__class__ = type(tensor)
    vars(new).update(vars(tensor))
    new.grad = None if tensor.grad is None else tensor.grad.detach().clone()
    return new


def of_mesh(value: Any) -> Any:
    """Change DTensors in a value, or in tuples and lists, to MeshTensors in place; returns it."""
    if isinstance(value, DTensor):
        if type(value) is DTensor:
            cast("Any", value).__class__ = MeshTensor
    elif type(value) in (tuple, list):
        for each in value:
            of_mesh(each)
    return value


def full_tensor(outputs: Any) -> Any:
    """Gather every DTensor that a step returned, on every rank; other tensors stay as they are.

    outputs: a tensor, or tuples, lists and dicts of them, such as logits to compare with labels. On
    the virtual mesh, and where nothing is sharded, outputs are plain tensors already. Collective.
    """
    return pytree.tree_map_only(DTensor, lambda output: output.full_tensor(), outputs)


def _by_mesh(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of lists of tensors once per mesh; returns all results in order."""
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
    """Unscale gradients; set `is_infinite` on all ranks if any is infinite or NaN. Collective."""
    parts = [local_part(g) if isinstance(g, DTensor) else g for g in gradients]
    UNSCALE([part for part in parts if part.numel()], is_infinite, inverse)
    dist.all_reduce(is_infinite, dist.ReduceOp.MAX)


def _is_of_infinity(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if arguments of a norm ask for the infinity norm of DTensors, none of them unreduced."""
    tensors: Any = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    return (
        args[1:] == (math.inf,)
        and not kwargs
        and all(isinstance(tensor, DTensor) for tensor in tensors)
        and not any(placement.is_partial() for tensor in tensors for placement in tensor.placements)
    )


def _largest(given: DTensor | Sequence[DTensor]) -> Any:
    """Return each tensor's infinity norm; NaN if it has a NaN (torch loses it). Collective."""
    tensors = [given] if isinstance(given, DTensor) else given
    parts = [local_part(tensor) for tensor in tensors]
    own = [part.abs().amax() if part.numel() else part.new_zeros(()) for part in parts]
    largest = start_maximum(torch.stack(own)).wait().unbind()
    return largest[0] if isinstance(given, DTensor) else list(largest)
