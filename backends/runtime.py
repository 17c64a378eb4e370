"""What an emitted module calls: collectives over named mesh axes on torch.distributed.

A collective gives a new tensor and leaves its operand as it was. Over axes of size 1 it does
nothing, so that a program for one device needs no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardweave.ir.dist import COLLECTIVES
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.shards import deal, undeal

# torch 2.13 deprecates the older names, which are all that 2.11 has.
_all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Group:
    """The ranks that a collective over some axes joins with this one.

    ranks: their global ranks by position along the axes, the first axis slowest.
    order: for each position the rank within `process_group`, which torch sorts by global rank.
    position: this rank's.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(self.size))

    def by_position(self, by_group_rank: Tensor) -> list[Tensor]:
        """Entries of dim 0, which stand by rank within the process group, by position."""
        return [by_group_rank[rank] for rank in self.order]

    def by_group_rank(self, by_position: Tensor) -> Tensor:
        """Inverse of `by_position`, as one tensor."""
        if self.is_sorted:
            return by_position
        return by_position[[self.order.index(rank) for rank in range(self.size)]]


class Runtime:
    """The devices of a mesh as this rank sees them.

    mesh: the mesh that the program is for; None or a mesh of one device needs no
    torch.distributed. device: where this rank computes; by default the current GPU under
    NCCL and else the CPU.

    Making one is collective: every rank makes its runtimes in the same order. Raises
    ValueError if the process group is missing or is not of the mesh's size.
    """

    def __init__(self, mesh: Mesh | None = None, device: torch.device | str | None = None) -> None:
        self.mesh = mesh or Mesh()
        self._groups: dict[tuple[str, ...], Group] = {}
        if self.mesh.num_devices == 1:
            self.rank = 0
            self.device = torch.device(device or "cpu")
            self.device_mesh: DeviceMesh | None = None
        else:
            _check_world(self.mesh)
            self.rank = dist.get_rank()
            self.device = torch.device(device or _default_device())
            self.device_mesh = init_device_mesh(
                self.device.type,
                tuple(axis.size for axis in self.mesh.space_axes),
                mesh_dim_names=tuple(axis.name for axis in self.mesh.space_axes),
            )
        self.coordinates = self.mesh.coordinates(self.rank)

    def prepare(self, program: Program) -> None:
        """Make the process groups that a program needs, which is slow, before it runs."""
        for op in program.ops:
            if isinstance(op, COLLECTIVES):
                self.group(op.axes)

    def group(self, axes: Sequence[str]) -> Group | None:
        """The group that `axes` join, made on first use by all ranks; None if it is one rank."""
        wide = tuple(axis for axis in axes if self.mesh.size(axis) > 1)
        if not wide:
            return None
        if wide not in self._groups:
            self._groups[wide] = self._make_group(wide)
        return self._groups[wide]

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        groups = self.mesh.groups(axes)
        mine = next(ranks for ranks in groups if self.rank in ranks)
        in_mesh_order = tuple(axis.name for axis in self.mesh.space_axes if axis.name in axes)
        if in_mesh_order != axes and in_mesh_order in self._groups:
            process_group = self._groups[in_mesh_order].process_group
        elif len(axes) == 1:
            assert self.device_mesh is not None
            process_group = self.device_mesh.get_group(axes[0])
        elif len(mine) == self.mesh.num_devices:
            process_group = dist.group.WORLD
        else:
            # Every rank takes part in making every group, its own or not.
            made = [dist.new_group(sorted(ranks)) for ranks in groups]
            process_group = made[groups.index(mine)]
        assert process_group is not None
        order = tuple(sorted(mine).index(rank) for rank in mine)
        return Group(process_group, tuple(mine), order, mine.index(self.rank))

    # Collectives

    def all_reduce(self, x: Tensor, axes: Sequence[str], op: str = "sum") -> Tensor:
        """The sum (or maximum) of `x` over `axes`, on every rank."""
        group = self.group(axes)
        if group is None:
            return x
        # Reducing a strided view in place corrupts it silently under gloo.
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, _reduction(op), group=group.process_group)
        return out

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], axes: Sequence[str], op: str = "sum"
    ) -> list[Tensor]:
        """`all_reduce` of several tensors, one message per dtype."""
        group = self.group(axes)
        if group is None:
            return list(tensors)
        reduced = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            buffer = torch.cat([tensors[index].reshape(-1) for index in chosen])
            dist.all_reduce(buffer, _reduction(op), group=group.process_group)
            pieces = buffer.split([tensors[index].numel() for index in chosen])
            for index, piece in zip(chosen, pieces, strict=True):
                reduced[index] = piece.view(tensors[index].shape)
        return reduced

    def all_gather(self, x: Tensor, axes: Sequence[str], dim: int, block: int) -> Tensor:
        """The shards of all ranks of `axes` along `dim`, `block` elements in turn."""
        group = self.group(axes)
        if group is None:
            return x
        flat = x.new_empty(group.size * x.numel())
        _all_gather_single(flat, x.reshape(-1), group=group.process_group)
        if group.is_sorted and dim == 0 and block == x.shape[0]:
            return flat.view(group.size * block, *x.shape[1:])
        return undeal(group.by_position(flat.view(group.size, *x.shape)), dim, block)

    def reduce_scatter(self, x: Tensor, axes: Sequence[str], dim: int, block: int) -> Tensor:
        """This rank's shard along `dim` of the sum over `axes`."""
        group = self.group(axes)
        if group is None:
            return x
        parts = group.by_group_rank(_dealt(x, dim, group.size, block))
        out = x.new_empty(parts.shape[1:])
        _reduce_scatter_single(out.view(-1), parts.reshape(-1), group=group.process_group)
        return out

    def all_to_all(
        self,
        x: Tensor,
        axes: Sequence[str],
        dim: int,
        block: int,
        from_dim: int,
        from_block: int,
    ) -> Tensor:
        """Gather `from_dim` over `axes` while `dim` is split over them."""
        group = self.group(axes)
        if group is None:
            return x
        parts = group.by_group_rank(_dealt(x, dim, group.size, block))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group.process_group)
        return undeal(group.by_position(received), from_dim, from_block)

    def broadcast(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """The value of the rank at coordinate 0 of `axes`."""
        group = self.group(axes)
        if group is None:
            return x
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, src=group.ranks[0], group=group.process_group)
        return out

    # What a rank knows of itself

    def position(self, axes: Sequence[str]) -> int:
        """This rank's position among the ranks of `axes`, the first axis slowest."""
        found = 0
        for axis in axes:
            found = found * self.mesh.size(axis) + self.coordinates[axis]
        return found

    def slice(self, x: Tensor, axes: Sequence[str], dim: int, block: int) -> Tensor:
        """This rank's shard along `dim` of a value that every rank of `axes` holds whole."""
        return deal(x, dim, self.mesh.sizes(axes), block, self.position(axes))

    def shard_index(self, axes: Sequence[str]) -> Tensor:
        """`position` as a scalar int64 tensor."""
        return torch.full((), self.position(axes), dtype=torch.int64, device=self.device)


def _dealt(x: Tensor, dim: int, size: int, block: int) -> Tensor:
    """`deal` for every index at once, stacked in a contiguous dim 0."""
    shape = list(x.shape)
    rounds = shape[dim] // (size * block)
    parts = x.reshape(*shape[:dim], rounds, size, block, *shape[dim + 1 :]).movedim(dim + 1, 0)
    return parts.reshape(size, *shape[:dim], rounds * block, *shape[dim + 1 :]).contiguous()


def _reduction(op: str) -> Any:
    if op not in _REDUCTIONS:
        raise ValueError(f"dist.all_reduce: found op = '{op}', expected 'sum' or 'max'.")
    return _REDUCTIONS[op]


def _default_device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_world(mesh: Mesh) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"mesh {mesh} has {mesh.num_devices} devices, but this process is alone: start one "
            f"process for each (torchrun --nproc-per-node {mesh.num_devices} ...) and call "
            "torch.distributed.init_process_group() first."
        )
    if dist.get_world_size() != mesh.num_devices:
        raise ValueError(
            f"mesh {mesh} has {mesh.num_devices} devices, but {dist.get_world_size()} processes "
            "were started; start one for each device."
        )
