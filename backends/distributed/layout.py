"""Conversions of shardings to DTensor's placements, and of shards to whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.optimizers.shards import dtensor_of, full_value, is_everywhere
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding, block_of, is_even
from shardweave.ir.mesh.shards import resized
from shardweave.ir.torch_private import StridedShard, take_strided_shards_as_they_are

take_strided_shards_as_they_are()


def placements_of(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> tuple[Placement, ...]:
    """Return DTensor's placements of a value of global `shape`, one per device axis, in mesh order.

    DTensor applies placements in mesh order, each to the shard that the earlier ones left. Our
    placement is a digit of the index. If its digit is not the next one, as in a strided shard, or
    for an axis that is major to an earlier one, it becomes a `StridedShard`, which splits the dim
    into `split_factor` parts and shards each part over the axis. Raises ValueError unless uneven
    dims are sharded as `torch.chunk` does, over one axis (`Sharding.is_chunked`).
    """
    if not sharding.is_chunked(shape):
        layout = ShardingAttr.of(sharding, tuple(shape))
        raise ValueError(
            f"a tensor of shape {tuple(shape)} cannot be stored as {layout}: DTensor can shard "
            "an uneven dim over one mesh axis only, in contiguous shards. Store it in such "
            "shards, and give this sharding under `used` in the plan."
        )
    placements: list[Placement] = []
    applied = Sharding.replicated(len(shape))
    for axis in mesh.device_axes:
        if axis.name in sharding.unreduced and axis.size > 1:
            placements.append(Partial(sharding.reduction))
            continue
        seats = [(d, p) for d, dim in enumerate(sharding.dims) for p in dim if p.axis == axis.name]
        if not seats:
            placements.append(Replicate())
            continue
        dim, placement = seats[0]
        if not is_even(sharding.dims[dim], shape[dim]):
            placements.append(Shard(dim))
            continue
        earlier = applied.dims[dim]
        run = block_of((*earlier, placement), placement)
        length = shape[dim] // math.prod(p.size for p in earlier)
        factor = length // (placement.size * run)
        placements.append(Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor))
        dims = (*applied.dims[:dim], (*earlier, placement), *applied.dims[dim + 1 :])
        applied = Sharding(dims)
    return tuple(placements)


def as_dtensor(
    local: Tensor,
    sharding: Sharding,
    runtime: Runtime,
    device_mesh: DeviceMesh | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Make the DTensor whose shard on this rank is `local`; returns `local` itself on one device.
    device_mesh: the devices that have the tensor; by default all. shape: the global shape, needed
    on ranks outside of `device_mesh`, whose shard is empty."""
    device_mesh = device_mesh or runtime.device_mesh
    if device_mesh is None:
        return local
    shape = sharding.global_shape(local.shape) if shape is None else shape
    if not shape and local.ndim:
        # Torch takes a scalar's shape () for a missing one, and infers it from the local tensor,
        # which it makes empty itself.
        local = local.new_empty(())
    placements = placements_of(sharding, shape, runtime.mesh)
    return dtensor_of(local, device_mesh, placements, shape)


def whole(local: Tensor, sharding: Sharding, runtime: Runtime) -> Tensor:
    """Gather the global tensor from the ranks' `local` shards, padded or not. Collective."""
    shape = sharding.global_shape(local.shape)
    local = resized(local, sharding.local_shape(shape))
    for axis in sharding.unreduced:
        local = runtime.all_reduce(local, (axis,), sharding.reduction)
    for dim, placements in enumerate(sharding.dims):
        # Minor axes first, so that major ones are gathered in larger blocks.
        for index in reversed(range(len(placements))):
            placement = placements[index]
            block = block_of(placements[: index + 1], placement)
            local = runtime.all_gather(local, (placement.axis,), dim, block)
    return resized(local, shape)


_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__")
"""Methods of tensors that return Python numbers."""


def _reading_whole_value(name: str) -> Any:
    read = getattr(Tensor, name)

    @wraps(read)
    def read_whole_value(tensor: DTensor, *args: Any) -> Any:
        is_here = is_everywhere(tensor.device_mesh)
        if is_here and all(isinstance(placement, Replicate) for placement in tensor.placements):
            return read(tensor.to_local(), *args)
        return read(full_value(tensor), *args)

    return read_whole_value


# The norm of a DTensor is unreduced, and torch 2.13 reads only the rank's own term of it.
for _name in _READS:
    setattr(DTensor, _name, _reading_whole_value(_name))
