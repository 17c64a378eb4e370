"""The ops of the `dist` dialect on lists that hold one tensor per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardweave.ir.dialects import dist
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.shards import cut_out, merge_blocks

Group = Sequence[Tensor]
"""One tensor per member of a group, in the order of the axes."""


def run_collective(
    op: dist.DistOp, operands: Sequence[Sequence[Tensor]], mesh: Mesh
) -> list[list[Tensor]]:
    """The results of a `dist` op on every rank of `mesh`, given its operands on every rank.

    Groups whose members hold the very same tensors share their results.
    """
    if isinstance(op, dist.ShardIndexOp):
        operands = [[torch.empty(0)] * mesh.num_devices]
    if isinstance(op, (dist.WaitOp, dist.ReshardOp)):  # a global program has whole values
        return [list(tensors) for tensors in operands]
    # What starts a collective is one of its kind.
    found = [run for kind, run in _IMPLEMENTATIONS.items() if isinstance(op, kind)]
    if not found:
        raise ValueError(f"the reference backend does not run '{op.name}'.")
    return [
        _on_groups(tensors, lambda members: found[0](op, members), op.axes, mesh)
        for tensors in operands
    ]


def _on_groups(
    tensors: Sequence[Tensor],
    run: Callable[[Group], list[Tensor]],
    axes: Sequence[str],
    mesh: Mesh,
) -> list[Tensor]:
    """Apply `run` to the members of each group that `axes` join."""
    found: dict[tuple[int, ...], list[Tensor]] = {}
    results = list(tensors)
    for ranks in mesh.groups(axes):
        members = [tensors[rank] for rank in ranks]
        key = tuple(id(member) for member in members)
        if key not in found:
            found[key] = run(members)
        for rank, result in zip(ranks, found[key], strict=True):
            results[rank] = result
    return results


def _reduced(members: Group, reduction: str) -> Tensor:
    if len(members) == 1:
        return members[0]
    stacked = torch.stack(list(members))
    if reduction == "max":
        return stacked.amax(0)
    if reduction == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    raise ValueError(f'dist.all_reduce: found op = "{reduction}", expected "sum" or "max".')


def _block_cyclic(op: dist.AlongDimOp, members: Group) -> list[Tensor]:
    """Of each member's tensor the blocks that fall to its position."""
    dim, block, size = op.dim, op.block, len(members)
    return [cut_out(tensor, dim, size, block, index) for index, tensor in enumerate(members)]


def _to_all(tensor: Tensor, members: Group) -> list[Tensor]:
    return [tensor] * len(members)


def _all_to_all(op: dist.AllToAllOp, members: Group) -> list[Tensor]:
    whole = merge_blocks(list(members), op.from_dim, op.from_block)
    return _block_cyclic(op, _to_all(whole, members))


_IMPLEMENTATIONS: dict[type[dist.DistOp], Callable[[Any, Group], list[Tensor]]] = {
    dist.AllReduceOp: lambda op, group: _to_all(_reduced(group, op.reduction), group),
    dist.ReduceScatterOp: lambda op, group: _block_cyclic(
        op, _to_all(_reduced(group, "sum"), group)
    ),
    dist.AllGatherOp: lambda op, group: _to_all(merge_blocks(list(group), op.dim, op.block), group),
    dist.AllToAllOp: _all_to_all,
    dist.SliceOp: _block_cyclic,
    dist.BroadcastOp: lambda op, group: _to_all(group[0], group),
    dist.ShardIndexOp: lambda op, group: [torch.tensor(index) for index in range(len(group))],
}
