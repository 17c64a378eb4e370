"""The ops of the `dist` dialect on lists that hold one tensor per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.dist_rows import RowsOp
from shardweave.ir.mesh.mesh import Mesh


def run_collective(
    op: dist.DistOp, operands: Sequence[Sequence[Tensor]], mesh: Mesh
) -> list[list[Tensor]]:
    """The results of a `dist` op on every rank of `mesh`, given its operands on every rank.

    Groups whose members hold the very same tensors share their results.
    """
    if isinstance(op, (dist.WaitOp, dist.ReshardOp)):  # a global program has whole values
        return [list(tensors) for tensors in operands]
    if isinstance(op, RowsOp):
        return [_of_rows(op, operands, mesh)]
    if not isinstance(op, dist.OverAxesOp):
        raise ValueError(f"the reference backend does not run '{op.name}'.")
    if isinstance(op, dist.ShardIndexOp):
        operands = [[torch.empty(0)] * mesh.num_devices]
    return [_on_groups(op, tensors, mesh) for tensors in operands]


def _of_rows(op: RowsOp, operands: Sequence[Sequence[Tensor]], mesh: Mesh) -> list[Tensor]:
    """The rows of every rank, or its part of the table that they are added to."""
    results = list(operands[0])
    for ranks in mesh.groups(op.axes):
        made = op.over_members([[tensors[rank] for tensors in operands] for rank in ranks])
        for rank, result in zip(ranks, made, strict=True):
            results[rank] = result
    return results


def _on_groups(op: dist.OverAxesOp, tensors: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """The results of an op on every rank, from the members of each group that its axes join."""
    known: dict[tuple[int, ...], list[Tensor]] = {}
    results = list(tensors)
    for ranks in mesh.groups(op.axes):
        members = [tensors[rank] for rank in ranks]
        key = tuple(id(member) for member in members)
        if key not in known:
            known[key] = op.on_shards(members)
        for rank, result in zip(ranks, known[key], strict=True):
            results[rank] = result
    return results
