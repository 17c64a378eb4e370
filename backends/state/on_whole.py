"""Functions of plain tensors and tensors on a mesh together: each rank computes on whole tensors.

A plain tensor is taken to be the same on every rank, as inputs are. `F.linear(x, model.up.weight)`
gathers the weight, and returns a plain tensor; `DTensor` itself raises an error. Gradients of any
order flow back into the shards. If ranks give rows of their own (`batch="local"`), gradients are
averaged over these ranks, as in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardweave.backends.optimizers.shards import full_value, shard_of
from shardweave.ir.torch_private import dtensor_spec, local_part, pytree, version_of

ROW_AXES: set[str] = set()
"""Mesh axes along which ranks give rows of their own, in any step of this process."""


def are_mixed(tensors: Sequence[Tensor]) -> bool:
    """True if a function of these tensors must run on full tensors: they are on several meshes, or
    plain tensors are among them (scalars without gradient do not count if all DTensors have
    dims)."""
    on_mesh = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    if len({tensor.device_mesh for tensor in on_mesh}) > 1:
        return True
    if not plain or not on_mesh:
        return False
    return any(t.ndim or t.requires_grad for t in plain) or not any(t.ndim for t in on_mesh)


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gather a DTensor into a plain tensor; gradients flow back to the DTensor. Collective."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Whole.apply(tensor)  # pyright: ignore[reportReturnType]
    return full_value(_plain(tensor)).detach()


def on_whole_tensors(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with full tensors in place of DTensors; copy in-place changes back into the
    shards. Collective."""
    leaves, tree = pytree.tree_flatten((list(args), kwargs))
    given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, DTensor)}
    values = {key: whole_tensor(tensor) for key, tensor in given.items()}
    before = {key: _version(value) for key, value in values.items()}
    new_args, new_kwargs = pytree.tree_unflatten([values.get(id(x), x) for x in leaves], tree)
    result = func(*new_args, **new_kwargs)
    for key, tensor in given.items():
        value = values[key]
        is_first = bool(args) and args[0] is tensor
        if _version(value) != before[key] or (is_first and _writes(func, value)):
            _write(value, tensor)
            if result is value:
                result = tensor
    return result


def _write(value: Tensor, into: DTensor) -> None:
    """Write a whole value into a DTensor's shards; if it is unreduced, to the first rank's term.

    A value with a gradient function is copied by autograd, which then knows what was computed."""
    if torch.is_grad_enabled() and value.requires_grad:
        into.copy_(_Sharded.apply(value, _reduced(_plain(into)), type(into), False))  # pyright: ignore[reportArgumentType]
        return
    coordinate = into.device_mesh.get_coordinate()
    if coordinate is None:
        return
    with torch.no_grad():
        own = local_part(into).copy_(shard_of(value, into))
    if any(p.is_partial() and at for p, at in zip(into.placements, coordinate, strict=True)):
        own.zero_()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _writes(func: Callable[..., Any], value: Tensor) -> bool:
    """True if a function writes to `value`, its first argument, which has no version counter that
    would show it (an inference tensor). Judged by the function's name."""
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return value.is_inference() and (is_method or name.startswith(("__i", "__setitem__")))


def _plain(tensor: DTensor) -> DTensor:
    """Return the same shard as torch's own DTensor, detached."""
    return DTensor(local_part(tensor).detach(), dtensor_spec(tensor), requires_grad=False)


def _reduced(tensor: DTensor) -> DTensor:
    """Reduce a DTensor if it is unreduced, to the placements of its gradient."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    goal = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=goal)


class _Whole(torch.autograd.Function):
    """Gathers a DTensor into a plain tensor. Its backward is `_Sharded`."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.like, ctx.kind = _reduced(_plain(tensor)), type(tensor)
        value = full_value(ctx.like)
        # Not a view: autograd refuses writes into a view that a custom function made.
        return value.new_empty(0).set_(value)  # pyright: ignore[reportArgumentType]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sharded.apply(gradient, ctx.like, ctx.kind, True)  # pyright: ignore[reportReturnType]


class _Sharded(torch.autograd.Function):
    """Shards a whole tensor, placed as `like`; a gradient is averaged over ranks that give rows of
    their own. Its backward gathers."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, like: DTensor, kind: type[DTensor], is_gradient: bool
    ) -> Tensor:
        if is_gradient:
            value = _mean_over_rows(value, like)
        own = shard_of(value, like).clone(memory_format=torch.contiguous_format)
        return kind(own, dtensor_spec(like), requires_grad=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        del ctx
        whole = whole_tensor(gradient) if isinstance(gradient, DTensor) else gradient
        return whole, None, None, None


def _mean_over_rows(value: Tensor, like: DTensor) -> Tensor:
    mesh = like.device_mesh
    # In the mesh's order, which is the same on every rank: each axis is a message.
    for axis in mesh.mesh_dim_names or ():
        if axis in ROW_AXES and mesh.get_coordinate() is not None and mesh[axis].size() > 1:
            value = value.contiguous().clone()
            dist.all_reduce(value, group=mesh.get_group(axis))
            value /= mesh[axis].size()
    return value
