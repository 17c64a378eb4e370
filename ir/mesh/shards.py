"""Cutting a torch tensor into its shards, and putting shards together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding


def take_blocks(tensor: torch.Tensor, dim: int, size: int, block: int, index: int) -> torch.Tensor:
    """Return shard `index` of `size` when `dim` is sharded block-cyclically by `block` indices."""
    shape = list(tensor.shape)
    rounds = shape[dim] // (size * block)
    parts = tensor.reshape(*shape[:dim], rounds, size, block, *shape[dim + 1 :])
    mine = parts.select(dim + 1, index)
    return mine.reshape(*shape[:dim], rounds * block, *shape[dim + 1 :])


def cut_out(tensor: torch.Tensor, dim: int, size: int, block: int, index: int) -> torch.Tensor:
    """Compute `take_blocks` as a copy, so that the rest of the tensor can be freed."""
    part = take_blocks(tensor, dim, size, block, index)
    is_view = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    is_less = part.numel() < tensor.numel()
    return part.clone(memory_format=torch.contiguous_format) if is_view and is_less else part


def merge_blocks(parts: list[torch.Tensor], dim: int, block: int) -> torch.Tensor:
    """Join shards into a tensor: blocks of `block` elements along `dim` from each shard in turn."""
    shape = list(parts[0].shape)
    cut = [*shape[:dim], shape[dim] // block, block, *shape[dim + 1 :]]
    stacked = torch.stack([part.reshape(cut) for part in parts], dim=dim + 1)
    return stacked.reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def take_shard(
    tensor: torch.Tensor, sharding: Sharding, coordinates: dict[str, int]
) -> torch.Tensor:
    """The contiguous shard of a global tensor that the device at `coordinates` holds.

    Shards have no padding, so shards of an uneven dim differ in shape. On an axis that is unreduced
    by a sum, coordinate 0 gets the values, and the others zeros.
    """
    shape = tensor.shape
    tensor = resized(tensor, sharding.padded_shape(shape))
    for dim, placements in enumerate(sharding.dims):
        # Major first: the blocks of a minor placement are then whole runs of what is left.
        for placement in placements:
            index = coordinates[placement.axis]
            tensor = take_blocks(tensor, dim, placement.size, placement.stride, index)
    tensor = resized(tensor, sharding.held_shape(shape, coordinates))
    if any(coordinates[axis] for axis in sharding.unreduced) and sharding.reduction == "sum":
        tensor = torch.zeros_like(tensor)
    return tensor.contiguous()


def held(
    part: torch.Tensor, sharding: Sharding, shape: Sequence[int], coordinates: Mapping[str, int]
) -> torch.Tensor:
    """Return `part`, a device's shard of a value of global `shape`, without its padding: a view."""
    return resized(part, sharding.held_shape(shape, coordinates))


def resized(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Truncate each dim of a tensor to `shape`, or pad it with zeros at the end."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    for dim, size in enumerate(shape):
        if tensor.shape[dim] > size:
            tensor = tensor.narrow(dim, 0, size)
    missing = [size - own for size, own in zip(shape, tensor.shape, strict=True)]
    if any(missing):
        pad = [amount for lack in reversed(missing) for amount in (0, lack)]
        tensor = torch.nn.functional.pad(tensor, pad)
    return tensor


def assemble(
    shard_at: Callable[[dict[str, int]], torch.Tensor], sharding: Sharding, mesh: Mesh
) -> torch.Tensor:
    """Assemble a global tensor from its shards. shard_at: returns the shard, with its padding, at
    given coordinates.

    Axes that the sharding does not name are read at coordinate 0; unreduced axes are reduced.
    """
    names = [p.axis for dim in sharding.dims for p in dim] + list(sharding.unreduced)
    padded = _assemble(shard_at, sharding, mesh, dict.fromkeys(mesh.names, 0), names)
    return resized(padded, sharding.without_padding(padded.shape))


def _assemble(
    shard_at: Callable[[dict[str, int]], torch.Tensor],
    sharding: Sharding,
    mesh: Mesh,
    coordinates: dict[str, int],
    names: list[str],
) -> torch.Tensor:
    if not names:
        return shard_at(coordinates)
    axis, *rest = names
    parts = [
        _assemble(shard_at, sharding, mesh, coordinates | {axis: index}, rest)
        for index in range(mesh.size(axis))
    ]
    seat = sharding.seat_of(axis)
    if seat is not None:
        # Minor axes come later in `names`, so they are whole again in `parts`.
        dim, placement = seat
        return merge_blocks(parts, dim, placement.stride)
    stacked = torch.stack(parts)
    return stacked.amax(0) if sharding.reduction == "max" else stacked.sum(0)
