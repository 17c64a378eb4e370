"""Conversions between DTensors, their full values and their shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardweave.ir.torch_private import StridedShard, dtensor_spec, local_part, set_strided_spec


def full_value(tensor: DTensor) -> Tensor:
    """Gather a DTensor on every rank. Collective, also on ranks outside of its device mesh."""
    mesh = tensor.device_mesh
    if local_part(tensor).device.type != mesh.device_type:  # a state that the host keeps
        tensor = beside(local_part(tensor).to(mesh.device_type), tensor)
    if mesh.size() == dist.get_world_size():
        return tensor.full_tensor()
    if mesh.get_coordinate() is None:
        device = local_part(tensor).device
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        full = DTensor.full_tensor(tensor).contiguous()
    dist.broadcast(full, src=int(mesh.mesh.flatten()[0]))
    return full


def full_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to a plain one; of a DTensor, copy the full value on every rank. Collective."""
    value = tensor.detach()
    # A DTensor that is replicated shows its own memory, which later steps write.
    return (full_value(value) if isinstance(value, DTensor) else value).clone()


def shard_of(full: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of `full`, placed as `like`, a DTensor of the same shape."""
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        return full.new_empty(local_shape(like))
    for size, at, placement in zip(
        like.device_mesh.shape, coordinate, like.placements, strict=True
    ):
        dim = divided_dim(placement)
        full = full if dim is None else part_along(full, dim, placement, size, at)
    return full


def divided_dim(placement: Placement) -> int | None:
    """Return the dim that a placement shards; None if it shards none."""
    return placement.dim if isinstance(placement, Shard | StridedShard) else None  # pyright: ignore[reportAttributeAccessIssue]


def part_along(x: Tensor, dim: int, placement: Placement, size: int, at: int) -> Tensor:
    """Return the shard of `x` along `dim` at coordinate `at` of a mesh axis of `size`. placement: a
    DTensor placement."""
    if isinstance(placement, StridedShard):
        factor: int = placement.split_factor  # pyright: ignore[reportAttributeAccessIssue]
        parts = x.unflatten(dim, (factor, size, -1)).select(dim + 1, at)
        return parts.flatten(dim, dim + 1)
    chunks = x.chunk(size, dim)
    return chunks[at] if at < len(chunks) else x.narrow(dim, 0, 0)


def local_shape(tensor: DTensor) -> tuple[int, ...]:
    """Return the shape of this rank's shard; an empty shard has as many dims as the tensor."""
    local = local_part(tensor)
    if not local.numel() and tensor.ndim and tensor.device_mesh.get_coordinate() is None:
        return (0, *tensor.shape[1:])
    return tuple(local.shape)


def shapes_of_shards(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a tensor's largest and smallest shard, the same on all ranks. For a
    tensor that only some stages have, the smallest is empty."""
    largest, smallest = list(tensor.shape), list(tensor.shape)
    if smallest and not is_everywhere(tensor.device_mesh):
        smallest[0] = 0
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        dim = divided_dim(placement)
        if dim is not None:
            largest[dim] = chunk = math.ceil(largest[dim] / size)
            smallest[dim] = max(0, smallest[dim] - chunk * (size - 1))
    return tuple(largest), tuple(smallest)


def beside(local: Tensor, parameter: DTensor) -> DTensor:
    """Make a DTensor of this rank's shard `local`, with the placements of `parameter`."""
    if local.dtype == parameter.dtype:
        return DTensor(local, dtensor_spec(parameter), requires_grad=False)
    mesh = parameter.device_mesh
    if mesh.get_coordinate() is None:
        local = local.new_empty(0)
    return dtensor_of(local, mesh, parameter.placements, parameter.shape)


def dtensor_of(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Make the DTensor of a global shape whose shard on this rank is `local`."""
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if any(isinstance(placement, StridedShard) for placement in placements):
        # By default torch reads strided placements as an order of plain ones, and gathers a dim in
        # the wrong order where they are none (torch 2.13).
        set_strided_spec(made, mesh, placements)
    return made


def in_placements_of(tensor: Tensor, parameter: DTensor) -> DTensor:
    """Give a full tensor or DTensor of a parameter's shape its placements. Collective."""
    if not isinstance(tensor, DTensor):
        # A copy: fused steps take states for contiguous, and a view would keep the full value.
        local = shard_of(tensor, parameter).clone(memory_format=torch.contiguous_format)
        return beside(local, parameter)
    if tensor.placements == parameter.placements:
        return tensor
    return tensor.redistribute(parameter.device_mesh, parameter.placements)


def is_everywhere(mesh: DeviceMesh) -> bool:
    """True if a mesh contains every process."""
    return mesh.size() == dist.get_world_size()
